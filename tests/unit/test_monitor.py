"""Test that xi follows Equation 5, that logs are complete, and that neither changes the training."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import ConfigurationError
from sparsync.algorithm import Algorithm
from sparsync.errors import NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.monitoring import Sink, XiProbe, sink_of
from sparsync.presets import resolve
from sparsync.published.oktopk import OkTopk, oktopk
from sparsync.selection import Exact
from sparsync.transports.sim import simulate
from sparsync.units import plan_units
from tests import attaching
from tests.draws import noise
from tests.tables import refuses

from .small_training import backward, model

SIZE, K, RANKS = 1000, 50, 3
ALWAYS = {
    "bytes_sent", "bytes_received", "imbalance", "skipped", "density", "density_local",
    "density_delivered", "density_reduced", "threshold", "residual_norm", "seconds_accumulate",
    "seconds_mask", "seconds_select", "seconds_pack", "seconds_communicate", "seconds_unpack",
}  # fmt: skip


def gradient(rank: int, step: int) -> torch.Tensor:
    return noise(SIZE, seed=100 * step + rank)


def reducer_of(comm, algorithm=None, size=SIZE, density=K / SIZE, **options):
    units = plan_units([("a", torch.zeros(size))])
    return Reducer(comm, units, algorithm or oktopk(), density, **options)


def logged(steps: int = 4, ranks: int = RANKS, algorithm=None, check=None, **options):
    """Run some steps; return rank 0's logged values by step."""

    async def program(comm):
        seen = {}
        units = plan_units([("a", torch.zeros(600)), ("b", torch.zeros(400))], 1600)
        given = {**options, "sink": Sink(seen.__setitem__)}
        reducer = Reducer(comm, units, algorithm or oktopk(), K / SIZE, **given)
        for step in range(steps):
            pieces = [piece.clone() for piece in gradient(comm.rank, step).split([600, 400])]
            await reducer.reduce(pieces)
            reducer.monitor.write()
            if check is not None:
                check(reducer, seen[step])
        reducer.monitor.close()
        return seen

    return simulate(program, ranks).results[0]


def test_the_numbers_are_those_of_the_step():
    def check(reducer, values):
        assert set(values) == ALWAYS
        assert all(type(x) in (int, float) for x in values.values())
        traffic = reducer.comm.ledger.last_step
        assert values["bytes_sent"] == traffic.sent
        assert values["bytes_received"] == traffic.received
        assert values["imbalance"] == traffic.received / traffic.sent
        norms = [float(r.value.norm()) for r in reducer.residuals]
        assert values["residual_norm"] == pytest.approx(math.hypot(*norms))
        assert values["density"] == values["density_local"] == K / SIZE
        assert 0 < values["density_delivered"] <= values["density_local"]
        assert values["density_reduced"] == K / SIZE

    assert list(logged(check=check)) == [0, 1, 2, 3]


def test_the_threshold_is_the_smallest_magnitude_selected():
    first = logged(steps=1)[0]
    pieces = gradient(0, 0).abs().split([600, 400])
    expected = [piece.topk(k).values[-1] for piece, k in zip(pieces, (30, 20), strict=True)]
    assert first["threshold"] == pytest.approx(float(min(expected)))


def test_stages_are_those_of_one_step():
    async def program(comm):
        seen = {}
        reducer = reducer_of(comm, resolve("allgather"), sink=Sink(seen.__setitem__))
        for step in range(3):
            await reducer.reduce([gradient(comm.rank, step)])
        reducer.monitor.close()
        return sum(v["seconds_communicate"] for v in seen.values()), comm.ledger.stages

    for total, stages in simulate(program, RANKS).results:
        assert total == pytest.approx(stages["communicate"])
        assert total > 0


def test_a_dense_step_has_no_threshold_and_one_rank_no_imbalance():
    warm = logged(steps=2, warmup=Warmup(1))
    assert "threshold" not in warm[0] and warm[0]["density_local"] == 1
    assert warm[0]["residual_norm"] == 0 and warm[1]["residual_norm"] > 0
    alone = logged(steps=1, ranks=1)[0]
    assert alone["bytes_sent"] == 0 and "imbalance" not in alone


def test_xi_is_logged_when_it_was_measured():
    steps = logged(steps=5, xi_period=2)
    assert [step for step, values in steps.items() if "xi" in values] == [0, 2, 4]
    assert set(steps[2]) - ALWAYS == {"xi", "signal_to_noise"}


def test_a_skipped_step_says_so():
    async def program(comm):
        seen = {}
        reducer = reducer_of(comm, sink=Sink(seen.__setitem__))
        await reducer.reduce([gradient(comm.rank, 0)])
        with pytest.raises(NonFiniteGradientError):
            await reducer.reduce([gradient(comm.rank, 1) / (0.0 if comm.rank == 1 else 1.0)])
        reducer.skip()
        await reducer.reduce([gradient(comm.rank, 2)])
        reducer.monitor.close()
        return seen

    for seen in simulate(program, RANKS).results:
        assert [values["skipped"] for values in seen.values()] == [0, 1, 0]
        assert seen[1]["bytes_sent"] > 0 and "residual_norm" not in seen[1]
        assert set(seen[2]) == ALWAYS


def test_a_line_is_in_the_file_when_its_step_is_over(tmp_path):
    sink = sink_of(tmp_path / "deep" / "a.jsonl", 1)
    sink.write(7, {"threshold": 0.5})
    line = json.loads((tmp_path / "deep" / "a.rank1.jsonl").read_text())
    assert line == {"step": 7, "threshold": 0.5}
    sink.close()


class Writer:
    """As TensorBoard's."""

    def __init__(self):
        self.scalars, self.flushed = {}, 0

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def flush(self):
        self.flushed += 1


def three_steps(log):
    """Run a job of three steps that logs."""

    async def program(comm):
        reducer = reducer_of(comm, sink=sink_of(log, 0))
        for step in range(3):
            await reducer.reduce([gradient(0, step)])
        reducer.monitor.close()

    simulate(program, 1)


def test_a_writer_of_tensorboard_gets_every_number_and_stays_open():
    three_steps(writer := Writer())
    tags, steps = map(set, zip(*writer.scalars, strict=True))
    assert tags == {f"sparsync/{name}" for name in ALWAYS - {"imbalance"}}
    assert steps == {0, 1, 2}
    assert writer.flushed == 1


@pytest.mark.slow
def test_a_run_of_weights_and_biases_gets_the_numbers_with_the_users(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="p") as run:
        three_steps(run)
        run.log({"loss": 1.0}, step=7)  # a later step than any that sparsync has logged
        found = dict(run.summary)
    assert found["sparsync/step"] == 2 and found["sparsync/residual_norm"] > 0


def test_a_meter_of_opentelemetry_has_a_gauge_of_every_number():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    three_steps(MeterProvider([reader]).get_meter("training"))
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {metric.name: metric.data.data_points[0] for metric in scope.metrics}
    assert found.keys() == {f"sparsync.{name}" for name in ALWAYS - {"imbalance"}}
    assert found["sparsync.residual_norm"].attributes == {"rank": 0}


# ---- attach(..., log=...), on one rank of gloo ------------------------------------------------------


@pytest.fixture
def ddp(alone):
    return lambda: DistributedDataParallel(model())


def attach(wrapped, log, **options):
    return attaching.attach(wrapped, density=0.1, transport="torch", log=log, **options)


def test_an_error_of_the_log_leaves_the_step_whole(ddp):
    def broken(step, values):
        if step == 1:
            raise ZeroDivisionError("mine")

    plain, watched = ddp(), ddp()
    handles = attach(plain, None), attach(watched, broken)
    backward(plain, 0), backward(watched, 0)
    backward(plain, 1)
    with pytest.warns(RuntimeWarning, match="failed at step 1 and ends here"):
        backward(watched, 1)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    mine, other = (one.state_dict()["content"]["reducer"]["residual"] for one in handles)
    assert all(torch.equal(value, other[name]) for name, value in mine.items())
    backward(watched, 2)  # without a message
    for handle in handles:
        handle.close()


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    said = r"^rank 3: log: cannot write '.*rank3.jsonl' \(.*; give"
    with pytest.raises(ConfigurationError, match=said):
        sink_of(tmp_path / "file" / "run.jsonl", 3)


def test_numbers_that_json_lacks_are_left_out(tmp_path):
    sink = sink_of(tmp_path / "run.jsonl", 0)
    sink.write(4, {"residual_norm": math.inf, "xi": math.nan, "density": 0.5})
    sink.close()
    assert json.loads((tmp_path / "run.rank0.jsonl").read_text()) == {"step": 4, "density": 0.5}


@refuses((3, {}, "log is 3"), (None, {"xi_period": 0}, "xi_period is 0"))
def test_what_cannot_be_logged_to_is_refused(log, options, ddp):
    attach(ddp(), log, **options)


@refuses(
    ({"xi_period": 2}, r"xi_period=2\) measures exchanges of gradients"),
    ({"nonfinite": "skip"}, r"nonfinite='skip'\) is for gradients, and updates"),
)
def test_what_is_of_gradients_alone_is_refused_where_updates_are_exchanged(given):
    net = torch.nn.Linear(2, 2)
    watched = sparsync.Monitoring(**given)
    sparsync.attach(net, torch.optim.AdamW(net.parameters()), monitoring=watched)


RANKS = 4
EXACT_OKTOPK = Algorithm("oktopk", Exact, OkTopk)


def signal_and_noise(size: int, step: int, rank: int) -> torch.Tensor:
    """Return a signal common to all ranks, plus twice as much noise; magnitudes span three decades."""
    common, own = (noise(size, seed=1000 * step + seed) for seed in (999, rank))
    return noise(size, seed=5).exp() * (common + 2 * own)


def top(x: torch.Tensor, k: int) -> torch.Tensor:
    kept = torch.zeros_like(x)
    where = x.abs().topk(k).indices
    kept[where] = x[where]
    return kept


def equation_5(size: int, k: int, steps: int) -> list[float]:
    """Run Ok-Topk SGD in a dense loop; return xi of every step."""
    residuals, result = torch.zeros(RANKS, size), []
    for step in range(steps):
        gradients = torch.stack([signal_and_noise(size, step, rank) for rank in range(RANKS)])
        accumulated = residuals + gradients
        sent = torch.stack([top(row, k) for row in accumulated])
        applied = top(sent.mean(0), k)
        lacking = top(accumulated.mean(0), k) - applied
        result.append(float(lacking.norm() / gradients.mean(0).norm()))
        residuals = accumulated - torch.where(applied != 0, sent, torch.zeros(()))
    return result


def measured(size: int, k: int, steps: int, algorithm: Algorithm = EXACT_OKTOPK, **options):
    """Return the values of xi that every rank measured, by step."""
    every, sizes = options.pop("every", 64), options.pop("sizes", None)

    async def program(comm):
        units = plan_units([(str(i), torch.zeros(n)) for i, n in enumerate(sizes or [size])], 4)
        reducer = Reducer(comm, units, algorithm, k / size, xi_period=1, **options)
        reducer.monitor.xi.every = every
        seen = []
        probe, measure = reducer.monitor.xi, reducer.monitor.xi.measure
        probe.measure = lambda *arguments: seen.append(measure(*arguments)) or seen[-1]
        for step in range(steps):
            pieces = signal_and_noise(size, step, comm.rank).split(sizes or [size])
            await reducer.reduce([piece.contiguous() for piece in pieces])
        return [one for one in seen if one is not None]

    results = simulate(program, RANKS).results
    assert all(other == results[0] for other in results), "ranks must agree bit for bit"
    return results[0]


def test_every_coordinate_gives_equation_5():
    expected = equation_5(3000, 60, steps=6)
    assert [one.xi for one in measured(3000, 60, 6, every=1)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("size", "k"), [(6_000, 600), (40_000, 400), (60_000, 6_000)])
def test_a_sample_estimates_xi(size, k):
    """The mean over steps is within twice the documented deviation of one step."""
    steps = 4
    expected = sum(equation_5(size, k, steps)) / steps
    found = sum(one.xi for one in measured(size, k, steps)) / steps
    assert found == pytest.approx(expected, rel=2 * (64 / k) ** 0.5)


def test_units_are_measured_together_and_in_any_order():
    whole = measured(3000, 60, 3, resolve("allgather"), every=1)
    (first, *_) = measured(3000, 60, 3, resolve("allgather"), every=1, sizes=[1000, 2000])
    assert first.signal_to_noise == pytest.approx(whole[0].signal_to_noise, rel=1e-5)
    assert first.xi != whole[0].xi  # units select for themselves on the first step


def test_signal_and_noise_are_told_apart():
    """With signal 1 and noise 4 per rank, both have equal squares in the mean of 4 ranks."""
    found = [one.signal_to_noise for one in measured(20_000, 200, 4, every=1)]
    assert sum(found) / 4 == pytest.approx(1.0, rel=0.15)


def test_rounding_is_part_of_it():
    both = EXACT_OKTOPK, resolve("budgeted")
    exact, rounded = (measured(4000, 400, 3, algorithm, every=1) for algorithm in both)
    assert rounded[0].xi > 0 and rounded[0].xi == pytest.approx(exact[0].xi, rel=0.05)
    assert rounded[0].xi != exact[0].xi


def test_all_exchanged_lacks_all_but_the_largest():
    """With k = n, no element is missing, so xi is 0; a dense warm-up measures nothing."""
    assert measured(500, 500, 2, resolve("dense"), every=1)[0].xi == pytest.approx(0.0, abs=1e-6)
    assert len(measured(500, 50, 5, every=1, warmup=Warmup(3))) == 2


def test_it_is_off_by_default_and_changes_nothing():
    async def program(comm, period):
        reducer = reducer_of(comm, resolve("budgeted"), 500, 0.1, xi_period=period)
        averages = [await reducer.reduce([signal_and_noise(500, s, comm.rank)]) for s in range(5)]
        return torch.stack([a.to_dense() for (a,) in averages]), comm.ledger.by_phase()

    (plain, phases), (watched, more) = (
        simulate(lambda comm, p=period: program(comm, p), RANKS).results[0] for period in (None, 2)
    )
    assert torch.equal(plain, watched)
    assert set(more) - set(phases) == {"xi"}


def test_no_gradient_has_no_xi():
    async def program(comm):
        reducer = reducer_of(comm, resolve("budgeted"), 90, 0.1, xi_period=1)
        await reducer.reduce([torch.zeros(90)])
        return reducer.step

    assert simulate(program, 3).results == [1, 1, 1]


def test_one_rank_has_no_noise_and_lacks_nothing():
    async def program(comm):
        reducer = reducer_of(comm, resolve("budgeted"), 900, 0.1, xi_period=1)
        probe = reducer.monitor.xi
        probe.every = 1
        seen, measure = [], probe.measure
        probe.measure = lambda *arguments: seen.append(measure(*arguments))
        await reducer.reduce([signal_and_noise(900, 0, 0)])
        return seen[0]

    (found,) = simulate(program, 1).results
    assert found.signal_to_noise == math.inf
    assert found.xi < 0.01  # bfloat16


@pytest.mark.parametrize("period", [0, -1, 2.0, True])
def test_bad_periods_are_refused(period):
    with pytest.raises(ConfigurationError, match="xi_period is"):
        XiProbe(period, [])
