import pytest

from bench.deployment import Deployment, baselines, parse_deployment, splits


@pytest.mark.parametrize(
    ("name", "num_prefill", "num_decode", "threads", "num_cores"),
    [
        ("1P1D", 1, 1, 1, 2),
        ("2P1D", 2, 1, 1, 3),
        ("3P13Dx4", 3, 13, 4, 64),
        ("colocated 1x2", 0, 1, 2, 2),
        ("colocated 2x1", 0, 2, 1, 2),
    ],
)
def test_a_name_says_nodes_and_cores(
    name: str, num_prefill: int, num_decode: int, threads: int, num_cores: int
) -> None:
    deployment = parse_deployment(name)
    assert deployment == Deployment(num_prefill=num_prefill, num_decode=num_decode, threads=threads)
    assert deployment.name == name
    assert deployment.num_cores == num_cores


@pytest.mark.parametrize("name", ["", "1P", "2D", "0P1D1", "colocated", "colocated 2", "1P1D x2 y"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no deployment"):
        parse_deployment(name)


@pytest.mark.parametrize("name", ["1P0D", "colocated 0x2", "colocated 2x0"])
def test_a_deployment_needs_a_node_that_decodes_and_a_thread(name: str) -> None:
    with pytest.raises(ValueError, match="needs a node that decodes"):
        parse_deployment(name)


def test_baselines_have_the_same_cores_as_one_node_and_as_one_node_per_core() -> None:
    names = [one.name for one in baselines(parse_deployment("2P1Dx2"), is_emulated=False)]
    assert names == ["colocated 1x6", "colocated 6x1"]


def test_emulated_nodes_are_compared_with_as_many_nodes() -> None:
    names = [one.name for one in baselines(parse_deployment("2P1D"), is_emulated=True)]
    assert names == ["colocated 3x1"]


def test_a_colocated_deployment_has_no_baselines() -> None:
    assert baselines(parse_deployment("colocated 1x2"), is_emulated=False) == ()


def test_all_nodes_of_a_deployment_share_the_kv_memory() -> None:
    options = parse_deployment("1P3D").node_options(kv_memory_gb=2.0)
    assert options == {"threads": 1, "kv_memory_gb": 0.5}


def test_splits_of_four_nodes_begin_colocated_and_end_with_one_decode_node() -> None:
    assert [one.name for one in splits(4)] == ["colocated 4x1", "1P3D", "2P2D", "3P1D"]
