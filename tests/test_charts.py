"""The charts of README and the site are what benchmarks/charts.py draws of the measured results."""

import charts


def test_the_charts_are_drawn_from_the_results():
    for name, svg in charts.charts().items():
        assert (charts.IMAGES / name).read_text() == svg, "run: python benchmarks/charts.py"
