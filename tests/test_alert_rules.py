"""The alert rules of the docs over made-up data, by Prometheus' own tool."""

import json
import subprocess

import pytest

from tests.conftest import _optional
from tests.servers import finding
from tests.test_docs import REFERENCE

RULES = (REFERENCE / "monitoring.md").read_text().split("```yaml")[1].split("```")[0]
REJECTED = "fencedlock_rejected_writes_total"
WAITS, HOLDS = "fencedlock_wait_seconds_bucket", "fencedlock_hold_seconds_bucket"


@pytest.fixture
def alerts(tmp_path):
    tool = _optional(finding.promtool).path
    (tmp_path / "rules.yml").write_text(RULES)

    def fires(alert, minute, series, expected):
        rule = RULES.split(f"alert: {alert}\n")[1]
        severity = rule.split("severity: ")[1].split("}")[0]
        summary = rule.split('summary: "')[1].split('"')[0]
        alerts = []
        for each in expected:
            labels = {"severity": severity, "alias": "default", **each}
            told = summary.replace("{{ $labels.pattern }}", labels.get("pattern", ""))
            told = told.replace("{{ $labels.alias }}", labels["alias"])
            alerts.append({"exp_labels": labels, "exp_annotations": {"summary": told}})
        tried = {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": alerts}
        data = [{"series": name, "values": numbers} for name, numbers in series.items()]
        test = {"interval": "1m", "input_series": data, "alert_rule_test": [tried]}
        case = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
        # YAML takes JSON.
        (tmp_path / "case.yml").write_text(json.dumps(case))
        command = [str(tool), "test", "rules", "case.yml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    return fires


def series(metric, pattern, numbers, **labels):
    labels = {"alias": "default", "pattern": pattern, **labels}
    told = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {f"{metric}{{{told}}}": numbers}


@pytest.mark.parametrize(
    ("alert", "metric"),
    [
        ("FencedLockStaleWrite", REJECTED),
        ("FencedLockLost", "fencedlock_losses_total"),
        ("FencedLockBypassed", "fencedlock_bypasses_total"),
    ],
)
@pytest.mark.parametrize(("minute", "fires"), [(25, False), (35, True), (60, False)])
def test_incidents(alerts, alert, metric, minute, fires):
    """One more, and the very first of a pattern, whose counter wasn't there before."""
    labels = {"reason": "stale"} if metric == REJECTED else {}
    data = {
        **series(metric, "one more", "5x30 6x60", **labels),
        **series(metric, "the first", "_x30 1x60", **labels),
        **series(metric, "long ago", "5x90", **labels),
    }
    expected = [{"pattern": "one more"}, {"pattern": "the first"}] if fires else []
    alerts(alert, minute, data, expected)


def test_an_object_that_was_read_before_its_lock_is_no_critical_incident(alerts):
    data = {
        **series(REJECTED, "early", "5x30 6x60", reason="read_before_lock"),
        **series(REJECTED, "early", "5x90", reason="stale"),
    }
    alerts("FencedLockStaleWrite", 35, data, [])
    alerts("FencedLockStaleObject", 35, data, [{"pattern": "early"}])


@pytest.mark.parametrize(("failed", "fires"), [("0+1x60", True), ("3x60", False)])
def test_renewals_that_fail(alerts, failed, fires):
    renewals = "fencedlock_renewals_total"
    data = {
        **series(renewals, "a", "0+9x60", outcome="ok"),
        **series(renewals, "a", failed, outcome="failed"),
    }
    alerts("FencedLockRenewalsFail", 30, data, [{}] if fires else [])


def test_waits_and_holds(alerts):
    def slow(metric, pattern, low, high, share, **labels):
        return {
            **series(metric, pattern, f"0+{share}x240", **labels, le=low),
            **series(metric, pattern, "0+100x240", **labels, le=high),
            **series(metric, pattern, "0+100x240", **labels, le="+Inf"),
        }

    data = {
        **slow(WAITS, "slow", "5", "10", 90, outcome="acquired"),
        **slow(WAITS, "quick", "5", "10", 99, outcome="acquired"),
    }
    alerts("FencedLockWaitsLong", 60, data, [{"pattern": "slow"}])
    data = {
        **slow(HOLDS, "long", "3600", "14400", 90),
        **slow(HOLDS, "short", "3600", "14400", 100),
    }
    alerts("FencedLockHeldLong", 120, data, [{"pattern": "long"}])


def test_starved_and_too_many_patterns(alerts):
    got, missed = "fencedlock_acquisitions_total", "fencedlock_conflicts_total"
    data = {
        **series(missed, "stuck", "0+1x240"),
        **series(got, "stuck", "7x240"),
        **series(missed, "never", "0+1x240"),
        **series(missed, "busy", "0+1x240"),
        **series(got, "busy", "0+1x240"),
        **series(got, "other", "0+1x240"),
    }
    alerts("FencedLockStarved", 150, data, [{"pattern": "stuck"}, {"pattern": "never"}])
    alerts("FencedLockTooManyPatterns", 150, data, [{}])
