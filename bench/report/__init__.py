"""What was measured, for people: HTML pages with plots, PNG files, and tables for the terminal.

    FOLDER of a command --runs.py, compared.py, ...--> page.py --> FOLDER/report.html, FOLDER/*.png
                                                  \\--> table.py --> terminal

Nothing is measured here. matplotlib is imported where a figure is drawn and nowhere above, so that
the command starts as fast without plots as it did before.
"""
