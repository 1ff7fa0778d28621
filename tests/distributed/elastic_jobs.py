"""The replica for tests of elastic training has a small model, SGD or AdamW, clipping and a schedule."""

import ctypes
import os
import signal
import time

import torch

import sparsync
from sparsync.cli.lab import local_address
from sparsync.elastic import catch_up, make_manager
from sparsync.feedback.agreed_setup import weights_digest
from sparsync.updates import OuterStep
from tests.attaching import ONE_BIT

STEPS = 4000  # tests use as many of these as they need


def shared_by_all(sync):
    """Return the weights that all ranks share, and the noise for which their steps are corrected."""
    noise = sync._weights.noise
    return [
        sync.outer.memory["shared"],
        *([] if noise is None else [noise.state_dict()["squares"]]),
    ]


class Account:
    """The sums, by element, of what this rank has put into exchanges and of what these have applied.

    The law holds for the sum over all past and present ranks: all that was put in is applied or in
    a residual.
    """

    def __init__(self, model):
        self.parameters = dict(model.named_parameters())
        size = sum(p.numel() for p in self.parameters.values())
        self.put, self.applied, self.waits = (torch.zeros(size).double() for _ in range(3))

    def of_gradients(self):
        """Observe every gradient before it is exchanged; call this before attach."""
        place = 0
        for parameter in self.parameters.values():

            def see(parameter, at=slice(place, place + parameter.numel())):  # noqa: B008
                self.waits[at] = parameter.grad.flatten()

            parameter.register_post_accumulate_grad_hook(see)
            place += parameter.numel()

    def of_updates(self, sync):
        """Observe every local step before it is exchanged."""
        self.sync, outer, size = sync, sync.outer, len(self.put)
        outer.advance = self.around(outer.advance)
        outer.conclude_with = self.around(outer.conclude_with)
        self.last = sync._weights.read(slice(size)).double()

    def around(self, exchange):
        async def seen(*rest):
            sync, here = self.sync, slice(len(self.put))
            weights = sync.outer._weights  # the model's, or a copy with which this rank leaves
            self.waits += self.last - weights.read(here)
            step, shared = sync.reducer.step, sync.outer.memory["shared"][here].double()
            await exchange(*rest)
            if sync.reducer.step > step:
                self.count(
                    sync.membership.attendance.last_step, shared - sync.outer.memory["shared"][here]
                )
            self.last = weights.read(here).double()

        return seen

    def count(self, last_step, average):
        """Record an exchange."""
        _, contributors, counts = last_step
        if counts:
            self.put += self.waits
        self.applied += contributors * average
        self.waits.zero_()

    def residual(self, sync):
        """Return this rank's residual."""
        found = {}
        for unit, kept in zip(sync.reducer.units, sync.reducer.residuals, strict=True):
            value = torch.zeros(unit.size) if kept.value is None else kept.value
            found |= {s.name: value[s.start : s.start + s.size] for s in unit.slots}
        return torch.cat([found[name] for name in self.parameters]).double()


def busy_without_steps(where, sync, model):
    """Do something for a minute, without taking a step."""
    until = time.monotonic() + 60
    if where == "shared":
        with sync.shared(), torch.no_grad():
            while time.monotonic() < until:
                model(torch.randn(8, 20))
    elif where == "native":  # no signal interrupts this: a mutex that is locked twice
        mutex = ctypes.create_string_buffer(128)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    elif where == "asleep":
        time.sleep(60)
    else:  # the program continues with a step after this rank has left
        assert where == "returns"
        while not sync.left and time.monotonic() < until:
            time.sleep(0.1)


def train(pipe, number, lighthouse, until, timeout, seed, seat, outer, late, errors, options):
    """Train to step ``until.value``; report the result of every step.

    With ``outer`` settings, an ``OuterStep`` made of these exchanges updates. A ``late`` replica
    begins to fetch a copy once it has taken the last step, however slow the machine is. Its stderr
    goes to the file ``errors``. ``options`` are further arguments of the manager, and these: with
    ``carries``, the scheduler is carried; with ``handles``, a handler of SIGTERM that is set after
    attach exits with code 7; ``pauses`` states where the replica pauses after contributing to some
    steps; ``algorithm`` and ``density`` are those of gradients; with ``in_turn``, each layer has an
    optimizer, and these step in turn; with ``spoils``, replica 0 makes all refuse every other exchange
    while another joins, which arrives in one of these. ``frozen`` is the seed of a layer that is not
    trained, beside a buffer of an integer that differs on every replica.
    """
    carries, handles = options.pop("carries", True), options.pop("handles", False)
    pauses, contributions = options.pop("pauses", ""), 0
    algorithm, density = options.pop("algorithm", None), options.pop("density", 0.1)
    in_turn, spoils = options.pop("in_turn", False), options.pop("spoils", False)
    frozen = options.pop("frozen", None)
    at_once = catch_up.fetch

    def fetch_late(source, timeout, since, stop):
        while not stop() and sync.steps < until.value:
            time.sleep(0.01)
        return at_once(source, timeout, since, stop)

    if late:
        catch_up.fetch = fetch_late
    if spoils:
        done = catch_up.CatchUp.done.fget
        catch_up.CatchUp.done = property(lambda its: done(its) and sync.reducer.step % 2 == 0)
    torch.set_num_threads(1)
    if seat is not None:
        seat.enter()
    # torchft's servers write a line at every step; this keeps these lines off the terminal
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    own = local_address() or "127.0.0.1"
    manager = make_manager(
        1, lighthouse=lighthouse, name=str(number), timeout=timeout, interface=own, **options
    )
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1, bias=False)
    )
    trained = list(model.parameters())
    if outer is None:
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(trained, lr=0.01)
    optimizers = [optimizer]
    if in_turn:
        optimizers = [torch.optim.SGD(its.parameters(), 0.05, 0.9) for its in (model[0], model[2])]
        optimizer = optimizers[-1]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    account = Account(model)
    if frozen is not None:
        torch.manual_seed(frozen)
        model.append(torch.nn.Linear(1, 1)).requires_grad_(False)
        model[:3].requires_grad_(True)
        model.register_buffer("number", torch.tensor(number))
    if outer is None:
        account.of_gradients()
        given = {"algorithm": algorithm, "density": density}
        sync = sparsync.attach(model, optimizers, elastic=manager, **given)
    else:
        settings = {**ONE_BIT, **outer}
        sync = sparsync.attach(model, optimizer, OuterStep(**settings), elastic=manager)
        account.of_updates(sync)
    if carries:
        sync.carry(scheduler=scheduler)
    if handles:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    returns = pauses == "returns"
    if returns:
        signal.signal(signal.SIGTERM, lambda *_: None)
    data = torch.Generator().manual_seed(number)
    while sync.steps < until.value and not sync.left:
        model.zero_grad()
        inputs = torch.randn(8, 20, generator=data)
        step = sync.steps
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
        loss.backward()
        joins = spoils and number == 0 and sync.membership.attendance.members.fetching
        if joins and sync.reducer.step % 2 == 0:  # never two in a row, which would end the job
            model[0].weight.grad[0, 0] = torch.nan
        average = [torch.zeros(p.numel()) if p.grad is None else p.grad for p in trained]
        average = torch.cat([one.flatten() for one in average])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # a joining rank counts the same steps as the others once it has had its first gradients
        optimizers[sync.steps % len(optimizers)].step()
        scheduler.step()
        if sync.steps > step:
            _, contributors, counts = sync.membership.attendance.last_step
            contributions += counts
            if outer is None:
                account.count(sync.membership.attendance.last_step, average)
            rate = optimizer.param_groups[0]["lr"]
            weights = model.parameters() if outer is None else shared_by_all(sync)
            members = sync.membership.attendance.members
            same = carries and not members.behind and not members.idle
            now = (weights_digest(weights), rate) if same else None
            pipe.send((time.time(), sync.steps, contributors, counts, now))
        time.sleep(0.01)
        if pauses and contributions >= 5 and sync.membership.attendance.last_step[1] > 1:
            rest = account.put if outer is None else account.put + account.waits
            kept = account.residual(sync).abs().mean().item()
            pipe.send({"put": rest.numpy(), "mean residual": kept})
            busy_without_steps(pauses, sync, model)
            pauses = ""
    if sync.left and not returns:
        time.sleep(10)  # it may have left between two steps a moment ago: its signal is on the way
    sync.finish()
    whole = [*model.parameters(), *(() if outer is None else model.buffers())]
    end = {"weights": weights_digest(whole), "loss": loss.item()}
    # the sums are sent as arrays, because the receiver would fetch tensors from this process, which
    # is about to end
    end |= {"put": account.put.numpy(), "applied": account.applied.numpy()}
    end["residual"] = account.residual(sync).numpy()
    pipe.send({**sync.stats()["elastic"], **end})
    sync.close()  # by then, the others have its last message
    os._exit(0)
