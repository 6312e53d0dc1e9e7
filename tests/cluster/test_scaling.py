"""When replicas are added and taken away, and what is read from their metrics."""

from __future__ import annotations

import pytest

from bequest.cluster.figures import Figures, read, total
from bequest.cluster.scaling import Load, Scaling, weight_of
from bequest.cluster.settings import ClusterSettings
from bequest.server.operation.metrics import Metrics

QUIET = Load(replicas=3, wait=0.0, waiting=0, leased_share=0.1)
WAITING = Load(replicas=3, wait=2.0, waiting=9, leased_share=0.1)
FULL = Load(replicas=3, wait=0.0, waiting=0, leased_share=0.9)
BETWEEN = Load(replicas=3, wait=0.5, waiting=1, leased_share=0.5)


def after(scaling: Scaling, load: Load, seconds: int, start: int = 0) -> list[int]:
    return [scaling.wanted(load, float(second)) for second in range(start, start + seconds)]


@pytest.mark.parametrize("load", [WAITING, FULL])
def test_one_more_when_it_lasts(load: Load) -> None:
    """And the next one only when it has lasted as long again."""
    wanted = after(Scaling(1, 9), load, 40)
    assert wanted[:15] == [3] * 15 and wanted[15] == 4
    assert wanted[16:31] == [3] * 15 and wanted[31] == 4


def test_a_moment_of_waiting_is_nothing() -> None:
    scaling = Scaling(1, 9)
    for second in range(60):
        assert scaling.wanted(WAITING if second % 10 else QUIET, float(second)) == 3


def test_one_less_after_long_quiet() -> None:
    wanted = after(Scaling(1, 9), QUIET, 302)
    assert set(wanted[:300]) == {3} and wanted[300] == 2


def test_between_the_marks_nothing_happens() -> None:
    assert set(after(Scaling(1, 9), BETWEEN, 1000)) == {3}


def test_leases_must_fit_into_the_rest() -> None:
    """Two of three replicas' budgets would be filled to 0.75."""
    held = Load(replicas=3, wait=0.0, waiting=0, leased_share=0.5)
    assert set(after(Scaling(1, 9), held, 1000)) == {3}


def test_within_its_bounds() -> None:
    assert set(after(Scaling(1, 3), WAITING, 100)) == {3}
    assert set(after(Scaling(3, 5), QUIET, 1000)) == {3}
    assert Scaling(4, 5).wanted(QUIET, 0.0) == 4
    assert Scaling(1, 2).wanted(QUIET, 0.0) == 2


def test_the_weight_of_a_replica_shrinks_with_its_leases() -> None:
    assert [weight_of(share / 10, 10) for share in range(0, 11, 2)] == [10, 10, 8, 6, 4, 2]
    assert weight_of(2.0, 10) == 1, "never none: nobody else may have room"


def test_figures_are_the_servers_own() -> None:
    """Of its real exposition: a name that is changed there must be changed here."""
    metrics = Metrics()
    exposition = metrics.exposition()[0].decode()
    for line in exposition.splitlines():
        assert "nan" not in line.lower()
    found = read(exposition.replace("vllm:num_requests_running{", 'vllm:num_requests_running{x="",'))
    assert found == Figures()
    text = "".join(
        f'# TYPE {family} gauge\n{family}{{model_name="m"}} {value}\n'
        for family, value in (("vllm:num_requests_running", 2), ("bequest:retention_charged_blocks", 30))
    )
    assert read(text) == Figures(running=2.0, leased_blocks=30.0)


def test_every_figure_is_in_the_exposition() -> None:
    from bequest.cluster.figures import _NAMES

    exposition = Metrics().exposition()[0].decode()
    assert [name for name in _NAMES.values() if f"\n{name}" not in exposition] == []


def test_sums_and_means() -> None:
    one = Figures(running=1, leased_blocks=10, budget_blocks=100, queued_requests=10, queued_seconds=5.0)
    two = Figures(running=2, leased_blocks=50, budget_blocks=100, queued_requests=2, queued_seconds=1.0)
    both = total([one, two])
    assert (both.running, both.leased_share) == (3, 0.3)
    assert both.mean_wait(one) == 0.5
    assert both.mean_wait(both) == 0.0
    assert total([]).leased_share == 0.0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"replicas": 1, "least": 2, "most": 3}, "--replicas must be from --min"),
        ({"replicas": 2, "least": 3, "most": 2}, "--min must be from 1 to --max"),
        ({"replicas": 1, "least": 0, "most": 2}, "--min must be from 1 to --max"),
        ({"replicas": 1, "least": 1, "most": 1, "routers": 0}, "--routers must be at least 1"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSettings(**fields)  # type: ignore[arg-type]


def test_the_command_of_a_replica() -> None:
    settings = ClusterSettings(
        replicas=1, least=1, most=1, port=9000, estates="/srv/e", serve=("m", "--dtype", "float32"), program=("x",)
    )
    assert settings.command(2, "127.0.0.1") == [
        *("x", "m", "--dtype", "float32", "--host", "127.0.0.1", "--port", "9102", "--replica-tag", "r2"),
        *("--estate-dir", "/srv/e/r2", "--estate-peers", "--drain-timeout", "30"),
    ]
