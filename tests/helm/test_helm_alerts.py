"""Alert rules of the chart: what they ask for exists, and what should be there is counted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.cluster.series import all_names
from support.deployment.chart_values import DEPLOYMENTS
from support.deployment.helm_chart import pick, render


def test_alerts_ask_for_series_that_exist() -> None:
    rule = pick(render(DEPLOYMENTS["monitoring"]), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (group,) = rule["spec"]["groups"]
    expressions = {alert["alert"]: alert["expr"] for alert in group["rules"]}
    assert len(expressions) == len(group["rules"]) == 8
    used = {name for expression in expressions.values() for name in re.findall(r"gemray_\w+", expression)}
    assert used - all_names() == set()
    for alert, expression in expressions.items():
        assert expression.count("{") == expression.count("}"), alert
        # Another release in the cluster must not raise this one's alerts.
        selectors = re.findall(r"gemray_\w+\{([^}]*)\}", expression)
        assert len(selectors) == len(re.findall(r"gemray_\w+", expression)), alert
        assert all('namespace="serving",service="demo-gemray"' in selector for selector in selectors), alert


@pytest.mark.parametrize(
    ("values", "least"),
    [
        ({}, None),
        ({"server": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}}, None),
        ({"gang": {"replicas": 3}, "server": {"replicas": 2}}, 6),
        ({"autoscaling": {"enabled": True, "minReplicas": 2}, "gang": {"replicas": 7}}, 2),
    ],
)
def test_an_alert_counts_the_gangs_that_should_always_serve(values: dict[str, Any], least: int | None) -> None:
    rule = pick(render({**values, "metrics": {"alerts": {"enabled": True}}}), "PrometheusRule")
    alerts = {alert["alert"]: alert for alert in rule["spec"]["groups"][0]["rules"]}
    if least is None:
        assert "GemrayGangsMissing" not in alerts
    else:
        assert alerts["GemrayGangsMissing"]["expr"].endswith(f'state="serving"}} or vector(0)) < {least}')
        assert "only {{ $value }} do" in alerts["GemrayGangsMissing"]["annotations"]["summary"]
