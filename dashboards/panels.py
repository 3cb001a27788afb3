"""Panels as this project draws them: every one with a unit, a description, and a text for when it is empty.

Colours are Grafana's own, which suit both of its themes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards import EMPTY_UNLESS

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

MODEL = 'model=~"$model"'
OF_CLASS = f'{MODEL}, slo_class=~"$class"'
OF_ENGINE = f'{MODEL}, engine=~"$engine"'
RATE = "[$__rate_interval]"

NO_REQUESTS = "No requests in this time range"
NO_ENGINES = "No engine is scraped: see prometheus/targets"
NO_TUNER = "No controller has led in this time range"

Panel = timeseries.Panel | stat.Panel | statetimeline.Panel | table.Panel
Kind = TypeVar("Kind", timeseries.Panel, stat.Panel, statetimeline.Panel, table.Panel)

Bands = Sequence[tuple[float | None, str]]
"""Where a colour begins, the lowest with `None`."""
PLAIN: Bands = ((None, "text"),)
WRONG_ABOVE_ZERO: Bands = ((None, "green"), (1, "red"))
WRONG_BELOW_ZERO: Bands = ((None, "red"), (0, "green"))


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL and the name of what it gives; `{{label}}` in the name is filled in by Grafana."""

    expr: str
    legend: str
    exemplars: bool = False
    """Show the traces behind single requests as points."""
    limit: bool = False
    """A bound or target: drawn dashed."""


@dataclass(frozen=True, slots=True)
class Text:
    """What every panel says about itself."""

    title: str
    about: str
    """What it shows and how to read it."""
    empty: str = NO_REQUESTS
    """Shown in place of data."""
    unless: str | None = None
    """For panels that have data only when something happens: what."""

    @property
    def description(self) -> str:
        return self.about if self.unless is None else f"{self.about} {EMPTY_UNLESS}{self.unless}."


def lines(
    text: Text,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    top: float | None = None,
    bottom: float | None = 0,
    width: int = 12,
    steps: bool = False,
) -> Panel:
    """Values over time. `steps` is for what jumps, like a knob."""
    panel = _described(timeseries.Panel(), text, width).unit(unit)
    if bottom is not None:
        panel = panel.min(bottom)
    if top is not None:
        panel = panel.max(top)
    panel = panel.fill_opacity(40 if stacked else 8).line_width(1).show_points(common_models.VisibilityMode.NEVER)
    panel = panel.legend(_legend()).tooltip(_tooltip())
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if steps:
        panel = panel.line_interpolation(common_models.LineInterpolation.STEP_AFTER)
    for ref_id, query in _lettered(queries):
        panel = panel.with_target(_target(ref_id, query))
        if query.limit:
            panel = panel.override_by_query(ref_id, _dashed())
    return panel


def number(text: Text, unit: str, query: Query, *, width: int = 4, named: bool = False, bands: Bands = PLAIN) -> Panel:
    """The value of now, large; `named` shows the name of the series instead of its value."""
    mode = common_models.BigValueTextMode.NAME if named else common_models.BigValueTextMode.AUTO
    panel = _described(stat.Panel(), text, width, height=4).unit(unit).text_mode(mode)
    panel = panel.graph_mode(common_models.BigValueGraphMode.NONE if named else common_models.BigValueGraphMode.AREA)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.thresholds(_thresholds(bands)).with_target(_target("A", query))


def states(
    text: Text, *queries: Query, words: Mapping[int, str], width: int = 12, height: int = 8, wordy: bool = True
) -> Panel:
    """What was the case when: one row a series, coloured by the word that its value stands for."""
    shown = common_models.VisibilityMode.AUTO if wordy else common_models.VisibilityMode.NEVER
    panel = _described(statetimeline.Panel(), text, width, height)
    panel = panel.mappings([_mapping(words)]).merge_values(True).row_height(0.8).fill_opacity(70)
    panel = panel.show_value(shown).legend(_legend(calcs=False)).tooltip(_tooltip())
    for ref_id, query in _lettered(queries):
        panel = panel.with_target(_target(ref_id, query))
    return panel


def rows(text: Text, query: Query, columns: Mapping[str, str], *, width: int = 12, height: int = 8) -> Panel:
    """The values of now as a table: `columns` names the labels to show, as they are and as they should read."""
    panel = _described(table.Panel(), text, width, height)
    target = _target("A", query).instant().format(PromQueryFormat.TABLE)
    options = {"excludeByName": {"Time": True}, "renameByName": {**columns, "Value": "Value"}}
    organise = models.DataTransformerConfig(id_val="organize", options=options)
    return panel.with_target(target).with_transformation(organise)


def _described(panel: Kind, text: Text, width: int, height: int = 8) -> Kind:
    panel = panel.title(text.title).description(text.description).no_value(text.empty)
    return panel.datasource(SOURCE).span(width).height(height)


def _target(ref_id: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id).datasource(SOURCE)
    return target.range().exemplar(True) if query.exemplars else target.range()


def _lettered(queries: Sequence[Query]) -> list[tuple[str, Query]]:
    return [(chr(ord("A") + at), query) for at, query in enumerate(queries)]


def _legend(*, calcs: bool = True) -> Builder[common_models.VizLegendOptions]:
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    legend = legend.display_mode(common_models.LegendDisplayMode.LIST)
    return legend.calcs(["lastNotNull"]) if calcs else legend


def _tooltip() -> Builder[common_models.VizTooltipOptions]:
    return (
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING)
    )


def _dashed() -> list[models.DynamicConfigValue]:
    dash = {"fill": "dash", "dash": [8, 6]}
    return [
        models.DynamicConfigValue("custom.lineStyle", dash),
        models.DynamicConfigValue("custom.fillOpacity", 0),
        models.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
    ]


def _thresholds(bands: Bands) -> Builder[models.ThresholdsConfig]:
    steps = [models.Threshold(start, colour) for start, colour in bands]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


COLOURS = ("blue", "green", "orange", "purple", "yellow", "red")


def _mapping(words: Mapping[int, str]) -> models.ValueMap:
    """The number 0 is grey, the others have a colour each."""
    results = {
        str(value): models.ValueMappingResult(
            text=word, color="text" if value == 0 else COLOURS[value - 1], index=index
        )
        for index, (value, word) in enumerate(words.items())
    }
    return models.ValueMap(options=results)
