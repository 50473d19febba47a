"""Charts of a comparison: points where they belong, scales that show them, colours that tell."""

import math
import re

import pytest

from rap.studies.report.charts import NUM_COLORS, ChartPoint, Series, line_chart, styles_of
from rap.studies.report.comparison import MATTER, comparison_of, matters

LABELS = ("x", "y")


def _series(values: list[float], name: str = "a") -> Series:
    return Series(name, [ChartPoint(0.1 * n + 0.1, y, f"at {y}") for n, y in enumerate(values)])


def _drawn(svg: str | None) -> dict[str, tuple[float, float]]:
    """By what is said of a point: where its marker stands, in units of the picture."""
    assert svg is not None
    found = re.findall(r'<title>([^<]*)</title>.*?<use [^>]*x="([\d.]+)" y="([\d.]+)"', svg)
    return {said: (float(x), float(y)) for said, x, y in found}


def _chart(series: list[Series], **options: float) -> str | None:
    styles = styles_of([one.name for one in series], matters)
    return line_chart(series, styles, LABELS, prefix="c", **options)


def test_a_chart_puts_its_points_where_they_belong():
    svg = _chart([_series([40.0, 20.0])], reference=20.0)
    first, last = _drawn(svg).values()
    assert first[0] < last[0]
    assert first[1] < last[1]
    dashed = re.search(r'd="M [\d.]+ ([\d.]+) [^"]*" style="[^"]*dasharray', svg or "")
    assert dashed is not None
    assert float(dashed[1]) == pytest.approx(last[1])


def test_with_a_floor_values_are_logarithmic_and_stand_on_it():
    places = _drawn(_chart([_series([0.001, 0.01, 0.1, 1e-9, -0.2, math.inf])], floor=1e-3))
    low, middle, high, tiny, negative = (y for _, y in places.values())
    assert low - middle == pytest.approx(middle - high, abs=0.01)
    assert low == tiny == negative
    # One outlier leaves the others apart.
    near, far, _ = (y for _, y in _drawn(_chart([_series([0.01, 0.02, 3.0])], floor=1e-3)).values())
    assert near - far > 20


def test_the_lowest_tick_says_what_stands_on_it():
    assert "\u22640.001" in (_chart([_series([0.01, 0.0])], floor=1e-3) or "")
    assert "\u2264" not in (_chart([_series([0.01, 0.002])], floor=1e-3) or "")


def test_without_a_floor_zero_stays_on_a_linear_axis():
    low, middle, high = (y for _, y in _drawn(_chart([_series([0.0, 50.0, 100.0])])).values())
    assert low - middle == pytest.approx(middle - high, abs=0.01)


def test_wide_shares_are_logarithmic():
    points = [ChartPoint(share, 1.0, f"{share}") for share in (0.5, 5.0, 50.0)]
    left, middle, right = (x for x, _ in _drawn(_chart([Series("a", points)])).values())
    assert middle - left == pytest.approx(right - middle, abs=0.01)


@pytest.mark.parametrize("shares", [(0.5,), (0.5037,), (0.5, 0.5015), (0.25, 0.5, 0.9), (3.0,)])
def test_ticks_of_shares_are_where_they_say(shares):
    svg = _chart([Series("a", [ChartPoint(share, 1.0, f"{share}") for share in shares])])
    ticks = re.findall(r'<text [^>]*x="([\d.]+)"[^>]*>(\d+)%<', svg or "")
    assert 3 <= len(ticks) <= 7
    steps = [(float(x), int(said)) for x, said in ticks]
    (x, said), (other_x, other_said) = steps[0], steps[-1]
    slope = (other_x - x) / (other_said - said)
    assert [x + slope * (one - said) for _, one in steps] == pytest.approx(
        [place for place, _ in steps], abs=slope / 4
    )


def test_nothing_to_draw_is_no_chart():
    assert _chart([_series([math.nan, math.inf])]) is None
    assert comparison_of([{"method": "dense"}], "r0") is None


def test_no_two_series_look_alike_and_those_that_matter_have_colours():
    few = styles_of([str(n) for n in range(NUM_COLORS)], matters)
    assert "series-rest" not in {style.color for style in few.values()}
    names = [f"other:{n}" for n in range(14)] + list(MATTER)
    many = styles_of(names, matters)
    assert list(many) == names
    assert len(set(many.values())) == 20
    assert [name for name in names if many[name].color != "series-rest"] == list(MATTER)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rap", True),
        ("rap:merge=1", True),
        ("rap:paper", True),
        ("kvpruner:paper", True),
        ("rap:key_share=pooled", False),
        ("kvpruner-indexed:paper", False),
        ("svdllm2", False),
    ],
)
def test_published_forms_matter_as_their_method(name, expected):
    assert matters(name) is expected
