"""Predicted training speed as a picture in SVG."""

from ronde.render.plan import PlanReport


def draw_chart(report: PlanReport) -> str:
    return ""
