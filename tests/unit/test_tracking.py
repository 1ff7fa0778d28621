"""First moments that follow the average: with them, the steps just done would have been the average's."""

import torch

from sparsync.averaging.tracking import follow

LR = 0.1


def drawn(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def test_adam():
    state = {"exp_avg": drawn(3, 5), "exp_avg_sq": drawn(3, 5).square(), "step": torch.tensor(7.0)}
    group = {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-8}

    def step():
        root = (state["exp_avg_sq"] / (1 - 0.99**7)).sqrt() + 1e-8
        return LR * state["exp_avg"] / (1 - 0.9**7) / root

    moved, average = 4 * step(), drawn(5, 3).T
    follow(state, group, moved, moved - average, 4)
    torch.testing.assert_close(4 * step(), average)


def test_sgd():
    state, group = {"momentum_buffer": drawn(5)}, {"lr": LR}
    moved, average = 3 * LR * state["momentum_buffer"], drawn(5) - 1
    follow(state, group, moved, moved - average, 3)
    torch.testing.assert_close(3 * LR * state["momentum_buffer"], average)


def test_muon_keeps_the_size_of_its_directions():
    for shape in ((6, 4), (4, 6)):
        left, sizes, right = torch.linalg.svd(drawn(*shape), full_matrices=False)
        state, scale = {"momentum_buffer": left @ sizes.diag() @ right}, 0.3
        moved, average = scale * left @ right, drawn(*shape).flip(0)
        follow(state, {"lr": LR, "ns_steps": 5}, moved, moved - average, 2)
        inner = right.T @ sizes.diag() @ right, left @ sizes.diag() @ left.T
        expected = average @ inner[0] if shape[0] > shape[1] else inner[1] @ average
        torch.testing.assert_close(state["momentum_buffer"], expected / scale)


def test_what_has_no_moment_or_has_not_moved_stays():
    for state in ({}, {"momentum_buffer": torch.ones(2)}, {"momentum_buffer": None}):
        before = repr(state)
        follow(state, {"lr": LR}, torch.zeros(2), torch.ones(2), 1)
        assert repr(state) == before
