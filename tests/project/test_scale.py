"""The model behind docs/scale.md must give the known results, and the table that it prints must be in the document."""

from dataclasses import replace

import pytest
from support.repo import ROOT

from benchmarks.scale import DAY, Times, course, goodput, interval, table

NEVER = replace(Times(), failures=1e-12)


def test_the_document_must_contain_the_table_of_the_model():
    assert table() in (ROOT / "docs" / "scale.md").read_text()


def test_without_failures_only_the_start_and_saving_must_cost_time():
    useful, start = goodput(64, NEVER)[0], (NEVER.start + 64 * NEVER.start_node) / (60 * DAY)
    assert useful == pytest.approx((1 - start) / (1 + NEVER.held / interval(64, NEVER)), abs=1e-9)


def test_failures_must_occur_at_their_rate():
    times = replace(Times(), hardware=0.0)
    found = course(1000, 100, times, seed=3)
    assert found.restarts == pytest.approx(1000 * 100 * times.failures, rel=0.1)


def test_a_failure_must_cost_half_an_interval_and_a_restart():
    times = replace(Times(), hardware=0.0, durable=0.0, held=1e-12, least=600.0)
    nodes, days = 100, 2000
    found = course(nodes, days, times, seed=5)
    lost = nodes * days * DAY - found.useful
    each = 300 + times.detect_worker + times.restart + nodes * times.restart_node
    assert lost == pytest.approx(found.restarts * nodes * each, rel=0.1)


def test_a_host_that_is_being_repaired_must_be_missing():
    times = replace(Times(), hardware=1.0, repair=DAY / 2, held=1e-12, durable=0.0, least=1.0, restart_node=0.0)
    found = course(100, 1000, times, seed=7)
    under_repair = 100 * times.failures * times.repair / DAY  # hosts, on average
    assert 1 - found.useful / (100 * 1000 * DAY) == pytest.approx(under_repair / 100, rel=0.2)
