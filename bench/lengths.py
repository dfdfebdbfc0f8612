"""How long prompts and answers are, in tokens, by a word of the command line.

256, fixed:256              always
uniform:100:400             every length from 100 to 400 alike
lognormal:200:0.8           median 200; the logarithm's deviation is 0.8: few are much longer
"""

import math
import random
from dataclasses import dataclass
from typing import Protocol


class Lengths(Protocol):
    """str() is the word that parse_lengths reads."""

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    num_tokens: int

    def draw(self, rng: random.Random) -> int:
        return self.num_tokens

    def __str__(self) -> str:
        return f"{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Both ends are included."""

    shortest: int
    longest: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.shortest, self.longest)

    def __str__(self) -> str:
        return f"uniform:{self.shortest}:{self.longest}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: int
    sigma: float

    def draw(self, rng: random.Random) -> int:
        return max(1, round(rng.lognormvariate(math.log(self.median), self.sigma)))

    def __str__(self) -> str:
        return f"lognormal:{self.median}:{self.sigma:g}"


def parse_lengths(word: str) -> Lengths:
    """Raises ValueError, one line, for a word that is none."""
    match word.split(":"):
        case [number] | ["fixed", number] if _is_length(number):
            return Fixed(int(number))
        case ["uniform", low, high] if _is_length(low) and _is_length(high):
            if int(low) <= int(high):
                return Uniform(int(low), int(high))
        case ["lognormal", median, sigma] if _is_length(median) and _is_positive(sigma):
            return LogNormal(int(median), float(sigma))
    raise ValueError(f"{word!r} is no length; write 256, uniform:100:400 or lognormal:200:0.8")


def _is_length(word: str) -> bool:
    return word.isdecimal() and int(word) >= 1


def _is_positive(word: str) -> bool:
    try:
        return 0 < float(word) < math.inf
    except ValueError:
        return False
