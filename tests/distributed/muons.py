"""Muons as people copy them, reduced to momentum: what matters here is their state and their messages."""

import torch
import torch.distributed as dist


class Muon(torch.optim.Optimizer):
    """Like Moonlight's: the constructor marks the parameters, and the first step creates the moments."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "wd": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["use_muon"] = parameter.ndim == 2

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                name = "momentum_buffer" if state["use_muon"] else "moment1"
                if name not in state:
                    state[name] = torch.zeros_like(parameter)
                state[name].lerp_(parameter.grad, 0.1)
                parameter.mul_(1 - group["lr"] * group["wd"])
                parameter.add_(state[name], alpha=-group["lr"])


class DistributedMuon(torch.optim.Optimizer):
    """Like Keller Jordan's: every rank steps its share of the parameters, and gathers the others."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for at, parameter in enumerate(group["params"]):
                owner = at % dist.get_world_size()
                if owner == dist.get_rank():
                    state = self.state[parameter]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    state["momentum_buffer"].lerp_(parameter.grad, 0.1)
                    parameter.add_(state["momentum_buffer"], alpha=-group["lr"])
                dist.broadcast(parameter, owner)
