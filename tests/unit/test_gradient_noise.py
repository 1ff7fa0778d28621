"""Test measurements of the noise in one rank's gradients, and the correction of Adam's steps."""

import pytest
import torch

from sparsync.transports.sim import simulate
from sparsync.updates import gradient_noise
from sparsync.updates.gradient_noise import GradientNoise, correct, noise_of, with_moments
from sparsync.updates.step_length import lengthen
from tests.draws import noise, seeded

from .far_device import FAR, far, far_device, waits

GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
DECAYED = {"weight_decay": 0.1, "maximize": True}
STEPS = 5


@pytest.fixture(autouse=True, params=[4, 15])
def runs(request, monkeypatch):
    monkeypatch.setattr(gradient_noise, "_RUN", request.param)


def trained(kind=torch.optim.AdamW, **options):
    """Take some steps; return the parameter, its optimizer, and the weights before the last step."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    optimizer = kind([parameter], **{**GROUP, **options})
    for _ in range(STEPS):
        before = parameter.detach().clone()
        parameter.grad = torch.randn_like(parameter) + 1
        optimizer.step()
    return parameter, optimizer, before


def corrected(optimizer, before, kept, options):
    """Return the weights after a last step whose second moment has this share of the squares."""
    ((_, state, _),) = with_moments(optimizer)
    mean = state["exp_avg"] / (1 - 0.9**STEPS)
    root = (state["exp_avg_sq"] / (1 - 0.99**STEPS) * kept).sqrt() + 1e-8
    return before * (1 - 0.1 * options.get("weight_decay", 0)) - 0.1 * mean / root


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6, 1.0, None])
@pytest.mark.parametrize("options", [{}, DECAYED, {"foreach": False}])
def test_a_corrected_step_is_that_of_the_averages_second_moment(share, options):
    """With 4 ranks, at least a fourth of the squares remains, even where a few samples suggest less."""
    parameter, optimizer, before = trained(**options)
    kept = 1.0 if share is None else max(share, 0.25)
    expected = corrected(optimizer, before, kept, options)
    correct(optimizer, {} if share is None else {parameter: share}, 4)
    torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("options", [{}, DECAYED])
def test_the_step_of_each_row_has_its_own_length(options):
    parameter, optimizer, before = trained(**options)
    kept = torch.tensor([[0.25], [0.6], [1.0]], dtype=torch.float64)
    expected = corrected(optimizer, before, kept, options)
    correct(optimizer, {parameter: torch.tensor([[0.1], [0.6], [1.0]])}, 4)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(7, 300), (3, 1), (1, 5), (0, 4), (4, 0)])
def test_rows_are_lengthened_alike_in_cpp_and_by_the_specification(shape):
    draw = seeded(0)
    first, weights = (torch.randn(shape, generator=draw) for _ in range(2))
    second = first.square() * torch.rand(shape, generator=draw)
    factors = torch.linspace(0.3, 1.2, shape[0])[:, None]
    numbers, expected = (1.1, 1.1, 1e-8, -0.01), weights.clone()
    gradient_noise._lengthen_plainly(first, second, expected, (factors, *numbers[1:]))
    strided = weights.clone().t().contiguous().t()  # takes the specification's way, in runs
    for mine in (weights, strided):
        gradient_noise._lengthen_rows(first, second, mine, factors, numbers)
        assert torch.equal(mine, expected)


def test_matrices_whose_rows_are_tokens_are_measured_by_rows():
    def measured_of(model, *known):
        """Return how many values are measured of a model, which ``noise_of`` may know or not."""
        optimizer = torch.optim.AdamW(model.parameters())
        return noise_of([optimizer], dict(model.named_parameters()), *known).values.numel()

    layers = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7), torch.nn.Linear(7, 7)
    model = torch.nn.Sequential(*layers)
    assert measured_of(model, model) == 66 * 5 + 2 * (7 + 7) and measured_of(model) == 66 * 5
    classes = torch.nn.Sequential(*layers[:2], torch.nn.Linear(7, 3))
    assert measured_of(classes, classes) == 66 * 5 + 2 * 7
    tied = torch.nn.Sequential(layers[0], torch.nn.Linear(4, 7, bias=False))
    tied[1].weight = layers[0].weight
    assert measured_of(tied, tied) == 66 + 2 * 7
    if hasattr(torch.optim, "Muon"):  # whose steps are measured, not gradients
        muon = torch.optim.Muon([model[0].weight])
        assert noise_of([muon], dict(model.named_parameters()), model).values.numel() == 66


def test_what_a_later_group_will_hold_is_measured_from_the_start():
    """Also, a state saved after the group was added fits an optimizer that has it from the start."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW([model.weight])
    noise = noise_of([optimizer], dict(model.named_parameters()))
    draw, ranks = seeded(0), 2
    for step in range(60):
        if step == 20:
            optimizer.add_param_group({"params": [model.bias]})
        sums = []
        for _ in range(ranks):  # pure noise, of which half remains in the average
            for parameter in model.parameters() if step >= 20 else [model.weight]:
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            noise.sample(step)
            sums.append(noise.values.clone())
        noise.values.copy_(torch.stack(sums).mean(0))
        noise.measure()
        assert (noise.shares[model.bias] == 1) == (step < 20)
    assert all(0.3 < noise.shares[parameter] < 0.7 for parameter in model.parameters())
    trained = dict(model.named_parameters())
    later = [torch.optim.Adamax([torch.nn.Parameter(torch.zeros(2))]), optimizer]
    assert noise_of(later, {**trained, "new": torch.zeros(3)}).values.numel() == 66 * 3
    other = torch.optim.SGD([model.bias])
    assert noise_of([torch.optim.AdamW([model.weight]), other], trained).values.numel() == 66


def test_a_rate_of_zero_and_elements_without_gradients_move_nothing():
    parameter, optimizer, _ = trained(lr=0.0)
    correct(optimizer, {parameter: 0.25}, 4)
    torch.manual_seed(0)
    assert torch.equal(parameter.detach(), torch.randn(3, 5, dtype=torch.float64))
    unseen = torch.nn.Parameter(torch.ones(6))
    optimizer = torch.optim.AdamW([unseen], weight_decay=0.0)
    unseen.grad = torch.tensor([1.0, 0, 0, 0, 0, 0])
    optimizer.step()
    correct(optimizer, {unseen: 0.25}, 4)
    assert unseen[1:].tolist() == [1.0] * 5 and unseen[0] < 1


def test_joined_parameters_are_treated_as_each_alone(monkeypatch):
    """Results are bit-identical, even with different steps, rates and memory formats."""
    shapes = ((3, 5), (7,), (2, 3, 4, 5), (0,), (11,), (4,), (1,))
    ends = []
    for small in (0, 20, 1000):
        monkeypatch.setattr(gradient_noise, "_SMALL", small)
        monkeypatch.setattr(gradient_noise, "_JOINED", 3)
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        parameters[2].data = parameters[2].data.to(memory_format=torch.channels_last)
        groups = [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, **GROUP)
        for step in range(3):
            for parameter in parameters:
                omitted = step == 1 and parameter.numel() == 11
                parameter.grad = None if omitted else 2 * parameter.detach()
            optimizer.step()
            correct(optimizer, dict.fromkeys(parameters, 0.5), 4)
        ends.append(parameters)
    for others in ends[1:]:
        assert all(torch.equal(one, other) for one, other in zip(ends[0], others, strict=True))


def test_other_moments_are_left_alone():
    assert not list(with_moments(trained(amsgrad=True)[1]))
    for kind in (torch.optim.NAdam, torch.optim.Adagrad):  # see ``lengths``
        optimizer = kind([torch.nn.Parameter(torch.ones(2))])
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        assert not list(with_moments(optimizer))


def measured(gradients, exchanges, ranks=4, by_rows=()):
    """Return each rank's shares after exchanges of samples; ``gradients(rank, at)`` maps names."""

    async def program(comm):
        names = gradients(0, 0)
        parameters = {name: torch.nn.Parameter(g.clone()) for name, g in names.items()}
        rows = [parameters[name] for name in by_rows]
        noise = GradientNoise(dict.fromkeys(parameters.values(), 0.99), by_rows=rows)
        for at in range(exchanges):
            for name, gradient in gradients(comm.rank, at).items():
                parameters[name].grad = gradient
            noise.sample(2 * at)
            total = await comm.allreduce(noise.values.flatten(), "samples")
            noise.values.copy_((total / ranks).view_as(noise.values))
            noise.measure()
        return [noise.shares[parameter] for parameter in parameters.values()], noise.state_dict()

    return simulate(program, ranks).results


def told_of(gradients, exchanges, shape):
    """Return what is known after measurements of one parameter, from their saved state."""
    (_, state), *_ = measured(gradients, exchanges)
    told = GradientNoise({torch.nn.Parameter(torch.zeros(shape)): 0.99})
    assert told.agreement is None
    told.load_state_dict(state)
    return told


def test_the_share_is_what_averaging_leaves_of_the_squares():
    def gradients(rank, at):
        own, signal = (noise(40, 50, seed=100 * at + one) for one in (rank, 99))
        return {
            "noise": own,
            "signal": signal,
            # a part that all ranks share is not noise, even if its sign changes on every step
            "turns": torch.full((30,), (-1.0) ** at),
            "both": own + signal,
            "none": torch.zeros(3),
            "empty": torch.zeros(0),
            "scalar": torch.tensor(1.0),
            "filters": torch.ones(4, 3, 2, 2),
        }

    (shares, _), *others = measured(gradients, 60)
    assert shares[0] == pytest.approx(1 / 4, rel=0.15)
    assert shares[1:3] == pytest.approx([1.0, 1.0], rel=0.1)
    assert shares[3] == pytest.approx((1 + 1 / 4) / 2, rel=0.15)
    assert shares[4:] == pytest.approx([1.0] * 4)
    assert all(theirs == shares for theirs, _ in others)


@pytest.mark.parametrize(
    ("common", "factor"), [(0.0, 2.0), (1.0, (2 / (1 + 1 / 4)) ** 0.5), (99.0, 1.0)]
)
def test_steps_are_lengthened_by_the_root_of_the_ranks_if_gradients_are_only_noise(common, factor):
    def gradients(rank, at):
        return {
            "one": noise(40, 50, seed=100 * at + rank) + common * noise(40, 50, seed=100 * at + 99)
        }

    assert told_of(gradients, 60, (40, 50)).lengthening(4) == pytest.approx(factor, rel=0.1)


def test_rows_of_an_embedding_have_shares_of_their_own():
    """A rare token's gradients are on one rank at a time, and a common one's on all."""

    def gradients(rank, at):
        table = noise(5, 64, seed=100 * at + rank)
        table[0] *= at % 4 == rank  # rare
        table[1] = 1.0  # common
        table[3] = 0.0  # never seen
        if rank == 2 and at == 7:
            table[4, 0] = torch.inf
        return {"b": torch.ones(3), "table": table, "other": table[:2].clone()}

    (shares, state), *others = measured(gradients, 60, by_rows=["table", "other"])
    table = shares[1].flatten().tolist()
    assert shares[1].shape == (5, 1) and shares[0] == 1.0
    assert table[0] == pytest.approx(1 / 4, rel=1e-2)
    assert table[1] == 1.0
    whole = state["squares"][0, 1] / state["squares"][1, 1]
    assert table[3] == pytest.approx(whole.item(), rel=0.01) and whole < 1
    assert table[2] == pytest.approx(1 / 4, rel=0.5) and table[4] < 0.5
    assert shares[2].flatten().tolist()[0] == pytest.approx(1 / 4, rel=1e-2)
    assert all(torch.equal(theirs[1], shares[1]) for theirs, _ in others)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3,), (5, 64), (2, 64))]
    resumed = GradientNoise(dict.fromkeys(parameters, 0.99), by_rows=parameters[1:])
    resumed.load_state_dict(state)
    assert torch.equal(resumed.shares[parameters[1]], shares[1])


def test_a_rank_with_infinite_gradients_takes_no_part_in_a_measurement():
    def gradients(rank, at):
        infinite = rank == 2 and at == 1
        return {"a": torch.full((9,), torch.inf if infinite else 1.0), "b": torch.ones(2)}

    (shares, state), *_ = measured(gradients, 3)
    assert all(0.7 < share <= 1 for share in shares)
    assert state["values"].isfinite().all() and state["squares"].isfinite().all()


def test_measurements_go_on_from_a_saved_state():
    parameters = {"a": torch.nn.Parameter(torch.ones(300))}
    first, second = (GradientNoise({parameters["a"]: 0.99}) for _ in range(2))
    for at, its in enumerate((first, first, second, second)):
        if at == 2:
            second.load_state_dict(first.state_dict())
            assert second.shares == first.shares != {}
        parameters["a"].grad = torch.arange(300.0) + at
        its.sample(at)
        its.values *= 0.5 + 0.1 * at
        its.measure()
    assert second.state_dict()["measured"] == 4 and 0 < second.shares[parameters["a"]] < 1


@pytest.mark.fast(4)
@pytest.mark.parametrize(("apart", "noisy"), [(0.0, 1.0), (0.0, 30.0), (1.0, 1.0), (3.0, 10.0)])
def test_agreement_tells_data_that_differ_from_noise(apart, noisy):
    """Gradients consist of a common part of unit size, persistent differences, and noise."""
    own = noise(4, 40, 50, seed=1)
    own -= own.mean(0)
    own /= own.square().mean().sqrt()

    def gradients(rank, at):
        drawn = noise(40, 50, seed=100 * at + rank)
        return {"w": noise(40, 50, seed=2) + apart * own[rank] + noisy * drawn}

    assert told_of(gradients, 80, (40, 50)).agreement == pytest.approx(1 / (1 + apart**2), abs=0.15)


def test_a_few_large_gradients_are_no_sign_of_data_that_differ():
    """Ranks draw gradients of very unequal size, so a single pair decides what seems to last."""

    def gradients(rank, at):
        draw = seeded(4_000_021 + 1000 * at + rank)
        size = (2 * torch.randn((), generator=draw)).exp()
        return {"w": 0.5 + size * torch.randn(9, 8, generator=draw)}

    told = told_of(gradients, 100, (9, 8))
    _, apart, differing, _ = told._lasting
    assert apart > 0.1 * differing
    assert told.agreement == 1


def test_ranks_with_the_same_data_agree_whatever_lasts():
    """Gradients change their sign between measurements, so nothing lasts but what roundoff leaves."""
    told = told_of(
        lambda _, at: {"w": noise(40, 50, seed=2) * (-1) ** at * (1 + 0.1 * at)}, 80, (40, 50)
    )
    assert told._lasting[0] < 0 < told._lasting[1]
    assert told.agreement == 1


def test_steps_are_corrected_together_as_often_as_a_parameter_was_stepped():
    """The second parameter rests in every second step, and the third gets its first gradients late."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64)) for _ in range(3)]
    optimizer, counts = torch.optim.AdamW(parameters, **GROUP), {}
    expected = {2: [2, 1, 0], 4: [2, 1, 0], 6: [2, 1, 1], 8: [2, 1, 2], 10: [4, 1, 4]}

    def end(parameter, times):
        state = optimizer.state[parameter]
        step, mean, square = state["step"].item(), state["exp_avg"], state["exp_avg_sq"]
        root = (square / (1 - 0.99**step)).sqrt()
        missing = 1 / (root / 2 + 1e-8) - 1 / (root + 1e-8)  # the share of squares is 1 / 4
        return parameter.detach() - times * 0.1 * missing * mean / (1 - 0.9**step)

    for step in range(1, 11):
        for parameter, rests in zip(parameters, (False, step % 2, step < 6), strict=True):
            parameter.grad = None if rests else torch.randn_like(parameter) + 1
        optimizer.step()
        if step == 10:  # as after a load: nothing is known but that there were four steps
            counts |= {parameter: (torch.ones(()), 7.0) for parameter in parameters[::2]}
        if step in expected:
            pairs = zip(parameters, expected[step], strict=True)
            ends = [end(p, times) if times else p.detach().clone() for p, times in pairs]
            steps = 4 if step == 10 else 2
            correct(optimizer, dict.fromkeys(parameters, 0.25), 4, counts, steps)
            for parameter, its in zip(parameters, ends, strict=True):
                torch.testing.assert_close(parameter.detach(), its)


def test_rates_and_counts_on_a_device_are_read_once():
    torch.manual_seed(0)
    given = [torch.randn(3, 5) for _ in range(4)]

    def corrected(device):
        there = far if device == FAR else torch.clone
        parameters = [torch.nn.Parameter(there(one)) for one in given[:2]]
        rates = [there(torch.tensor(0.1 + n)) for n in range(2)]
        groups = [{"params": [p], "lr": r} for p, r in zip(parameters, rates, strict=True)]
        optimizer = torch.optim.AdamW(groups, foreach=False, betas=(0.9, 0.99))
        for parameter in parameters:
            parameter.grad = there(given[0])
            moments = {"exp_avg": there(given[2]), "exp_avg_sq": there(given[3].square())}
            optimizer.state[parameter] = {"step": there(torch.tensor(STEPS * 1.0)), **moments}
        waits.clear()
        correct(optimizer, dict.fromkeys(parameters, 0.25), 4)
        return [parameter.detach().cpu() for parameter in parameters]

    expected = corrected(torch.device("cpu"))
    with far_device():
        found = corrected(FAR)
    assert waits["tolist"] == 1 and waits.total() == 1 + 2  # the test itself reads the parameters
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], given[0])


def test_a_decay_on_a_device_is_read_once():
    with far_device():
        parameters = [torch.nn.Parameter(far(torch.ones(3))) for _ in range(2)]
        optimizer = torch.optim.Adamax(parameters, lr=0.5, weight_decay=0.1, foreach=False)
        optimizer.param_groups[0]["lr"] = far(torch.tensor(0.5))
        optimizer.param_groups[0]["decoupled_weight_decay"] = True
        steps = {parameter: far(torch.full((3,), 2.0)) for parameter in parameters}
        for parameter in parameters:
            parameter.grad = far(torch.ones(3))
        waits.clear()
        lengthen(optimizer, steps, dict.fromkeys(parameters, 0.25), 4)
        assert waits == {"tolist": 1}
        # of -1, the decay is 0.05 times 2, and the rest is doubled
        assert parameters[1].tolist() == pytest.approx([0.1] * 3)


def test_a_fused_step_that_a_scaler_skips_is_not_corrected():
    """Torch sets the count of a skipped first step back to 0, and the bias correction divides by it."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = torch.optim.AdamW([parameter], **GROUP, fused=True)
    optimizer.register_step_post_hook(lambda one, *_: correct(one, {parameter: 0.25}, 4))
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        scaler.scale(parameter.square().sum() * (torch.inf if step % 2 == 0 else 1.0)).backward()
        before = parameter.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(parameter.detach(), before) == (step % 2 == 0)
