"""Corners where a replica could silently train something else than it should."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overtone
from overtone import Cluster, Replica, Solo
from overtone.coding.layout import part_of
from overtone.errors import MethodError, MismatchError, ModelError, PeerError, StateError
from overtone.ledger import Count
from overtone.transport import run_exchange
from scenario import CONSENSUS, METHODS, backward, batches, build, largest_difference, run_cluster, weights


def two_layers(frozen: int, size: int = 64) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, size, bias=False))
    model[frozen].requires_grad_(False)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_different_frozen_parameters_are_refused() -> None:
    told = r"parameter 0\.weight: 64x64 float32, frozen on rank 0; 64x64 float32 on rank 1"
    with pytest.raises(MismatchError, match=told):
        Cluster(two_layers, overtone.decoupled(), replicas=2)


def test_a_damaged_anchor_is_found_in_the_very_next_message() -> None:
    for method in (overtone.decoupled(every=1), overtone.diloco(every=1), overtone.ddp()):
        cluster = Cluster(build, method, replicas=3)
        streams = [batches(rank) for rank in range(3)]
        for index in range(2):
            for replica in cluster.turns():
                backward(replica, next(streams[replica.transport.rank]))
            if index == 0:
                cluster.step()
                cluster.replicas[1].exchanger.anchor_tensors()[0].view(-1)[5] += 1e-4
        with pytest.raises(MismatchError, match=r"round 1: the anchors .* on ranks 0, 2; .* on rank 1"):
            cluster.step()


def test_damage_after_the_last_round_is_found_by_finish() -> None:
    cluster = Cluster(build, overtone.diloco(every=1), replicas=2)
    for replica in cluster.turns():
        backward(replica, next(batches(replica.transport.rank)))
    cluster.step()
    cluster.replicas[1].state.tensors["anchor"][3] += 1e-3
    with pytest.raises(MismatchError, match="anchors"):
        cluster.finish()


class Flaky(Solo):
    """Answers at once, but breaks off the exchange number ``fails``."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.left = fails

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise PeerError("the exchange broke off")

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        self._count()
        return super().gather(message, most=most, count=count)

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:
        self._count()
        return super().sum(buffer, count=count)


@pytest.mark.parametrize("name", ["decoupled", "diloco", "local_sgd"])
def test_a_round_that_broke_off_is_made_up_for(name: str) -> None:
    """With one replica, step 1 and no momentum the weights follow the inner optimizer, whatever rounds do; a round that
    failed and came again must neither lose the drift nor count it twice."""
    method = METHODS[name]
    method = replace(method, rule=replace(method.rule, lr=1.0, momentum=0.0), drain=0)
    broken = Replica(*build(0), method, Flaky(fails=6))
    model, inner = build(0)
    failures = 0
    for batch, _ in zip(batches(0), range(8), strict=False):
        backward(broken, batch)
        try:
            broken.step()
        except PeerError:
            failures += 1
        inner.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        inner.step()
    assert failures == 1
    assert (
        largest_difference(weights(broken), model.state_dict()) < 2e-3
    )  # AdamW amplifies rounding; a lost round is 0.01
    carried = broken.state.tensors["anchor"] - broken.state.tensors.get("residual", torch.zeros(()))
    start = broken.exchanger.layout.read(
        broken.exchanger.signal.state(), torch.zeros_like(broken.state.tensors["anchor"])
    )
    assert float((carried - start).abs().max()) < 1e-5


def test_state_is_refused_in_the_middle_of_an_exchange() -> None:
    replica = Replica(*build(0), overtone.decoupled(every=1), Solo())
    backward(replica, next(batches(0)))
    replica.local_step()
    talk = replica.rounding()
    next(talk)  # its message is on the way
    with pytest.raises(StateError, match="in the middle of a round"):
        replica.state_dict()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_state_round_trip_with_several_replicas(method: overtone.Method) -> None:
    """Each replica's own state, residual included, brought back into a new cluster in the middle of a round."""

    def play(cluster: Cluster, first: int, last: int) -> None:
        streams = [batches(rank) for rank in range(2)]
        for step in range(last):
            drawn = [next(stream) for stream in streams]
            if step >= first:
                for replica in cluster.turns():
                    backward(replica, drawn[replica.transport.rank])
                cluster.step()

    straight, halted, resumed = (Cluster(build, method, replicas=2) for _ in range(3))
    play(straight, 0, 9)
    play(halted, 0, 5)
    for old, new in zip(halted.replicas, resumed.replicas, strict=True):
        new.model.load_state_dict(old.model.state_dict())
        new.inner.load_state_dict(old.inner.state_dict())
        new.load_state_dict(old.state_dict())
    play(resumed, 5, 9)
    for a, b in zip(straight.replicas, resumed.replicas, strict=True):
        assert largest_difference(weights(a), weights(b)) == 0.0
        assert a.fingerprint == b.fingerprint


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(70, 70))
        self.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))
        self.register_buffer("table", torch.randn(1000))
        self.register_buffer("exact", torch.randn(9, dtype=torch.float64))


@pytest.mark.parametrize("method", CONSENSUS.values(), ids=CONSENSUS)
def test_resting_buffers_are_left_exactly_as_they_are(method: overtone.Method) -> None:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Masked()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    cluster = Cluster(make, method, replicas=7)
    before = {name: b.clone() for name, b in cluster.replicas[0].model.named_buffers()}
    for _ in range(4):
        for replica in cluster.turns():
            replica.model.weight.grad = torch.randn(70, 70)
        cluster.step()
    for name, buffer in cluster.replicas[3].model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("method", [overtone.decoupled(every=1), overtone.diloco(every=1)], ids=["gathered", "summed"])
def test_statistics_that_are_not_finite_are_refused_by_name(method: overtone.Method) -> None:
    cluster = Cluster(build, method, replicas=2)
    for replica in cluster.turns():
        backward(replica, next(batches(0)))
    cluster.replicas[1].model.norm.running_var[2] = float("nan")
    with pytest.raises(PeerError, match="rank 1 could not take part"):
        cluster.step()
    assert bool(torch.isfinite(cluster.replicas[0].model.norm.running_var).all())


def test_the_transform_ignores_autocast() -> None:
    replica = Replica(*build(0), overtone.decoupled(every=1), Solo())
    with replica.anchor() as model:
        plain = model.up.weight.clone()
    with torch.autocast("cpu", torch.bfloat16), replica.anchor() as model:
        assert torch.equal(model.up.weight, plain)


@pytest.mark.parametrize("method", [overtone.ddp(), overtone.decoupled(every=1)], ids=["ddp", "decoupled"])
def test_a_disabled_scaler_is_no_scaler(method: overtone.Method) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    a, b = (Replica(*build(0), method, Solo()) for _ in range(2))
    for replica, options in ((a, {"scaler": scaler}), (b, {})):
        backward(replica, next(batches(0)))
        replica.step(clip=1.0, **options)
    assert largest_difference(weights(a), weights(b)) == 0.0


def test_a_zero_gradient_here_and_none_there() -> None:
    """Either all replicas step a parameter or none does: weight decay must not tell them apart."""
    cluster = Cluster(build, overtone.ddp(), replicas=2)
    for _ in range(2):
        for replica in cluster.turns():
            backward(replica, next(batches(0)))
            if replica.transport.rank == 0:
                replica.model.unused.grad = torch.zeros(3, 2)
        cluster.step()
    assert torch.equal(*(replica.model.unused for replica in cluster.replicas))


def test_parameters_outside_the_model_are_refused() -> None:
    model = nn.Linear(4, 4)
    temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ModelError, match="1 of its parameters are not the model's"):
        Replica(model, torch.optim.SGD([*model.parameters(), temperature], lr=0.1), transport=Solo())


def test_compiled_models_with_buffers_meet_plain_ones() -> None:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, inner = build(rank)
        return (torch.compile(model, backend="eager") if rank else model), inner

    Cluster(make, overtone.decoupled(), replicas=2)


@pytest.mark.parametrize("carry", [1.0, 0.5, 0.0])
def test_draining_ends_at_the_mean_of_the_replicas(carry: float) -> None:
    method = overtone.decoupled(every=2, keep=20, carry=carry, drain=30)
    cluster = Cluster(build, method, replicas=2)
    streams = [batches(rank) for rank in range(2)]
    for _ in range(4):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()
    a, b = (dict(replica.model.named_parameters()) for replica in cluster.replicas)
    mean = {name: (a[name].detach() + b[name].detach()) / 2 for name in a}
    cluster.finish()
    assert largest_difference(mean, {n: p.detach() for n, p in cluster.replicas[0].model.named_parameters()}) < 2e-4


def test_gradient_methods_exchange_at_each_step() -> None:
    with pytest.raises(
        MethodError, match=r"every=4: gradient methods exchange at each step; use every=1 or diloco\(\)"
    ):
        replace(overtone.ddp(), every=4)


def test_stepping_inside_the_anchor_is_refused() -> None:
    replica = Replica(*build(0), overtone.decoupled(every=1), Solo())
    backward(replica, next(batches(0)))
    with replica.anchor(), pytest.raises(ModelError, match="step after it"):
        replica.step()
    with replica.anchor(), pytest.raises(ModelError, match="leave the first"), replica.anchor():
        pass
    assert replica.step() is not None


@pytest.mark.parametrize(
    ("numbers", "told"), [({"bits": 1.0}, r"bits=1\.0"), ({"keep": "8"}, "keep='8'"), ({"chunk": 64.0}, r"chunk=64\.0")]
)
def test_numbers_of_the_wrong_type(numbers: dict[str, object], told: str) -> None:
    with pytest.raises(MethodError, match=told):
        overtone.decoupled(**numbers)  # type: ignore[arg-type]


def test_a_method_that_was_not_called() -> None:
    with pytest.raises(MethodError, match="give a Method, such as"):
        Replica(*build(0), overtone.decoupled, Solo())  # type: ignore[arg-type]


def test_a_world_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PeerError, match="WORLD_SIZE=4, but there is no process group"):
        Replica(*build(0), overtone.decoupled())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from overtone.exchange import description

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        monkeypatch.setattr(description, "__version__", f"0.{rank}")
        return build(rank)

    with pytest.raises(MismatchError, match=r"overtone: 0\.0 on rank 0; 0\.1 on rank 1"):
        Cluster(make, overtone.decoupled(), replicas=2)


def test_models_of_tiny_empty_and_scalar_tensors() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.zeros(0, 5))
            self.one = nn.Parameter(torch.ones(1, 1, 1))

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Odd()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    for method in METHODS.values():
        cluster = Cluster(make, method, replicas=2)
        for _ in range(4):
            for replica in cluster.turns():
                for p in replica.model.parameters():
                    p.grad = torch.ones_like(p)
            cluster.step()
        cluster.finish()
        assert float(cluster.replicas[0].model.scalar.detach()) < 1.0


def test_a_finished_replica_can_go_on() -> None:
    cluster = run_cluster(overtone.decoupled(every=3), replicas=2, steps=4)
    streams = [batches(rank) for rank in range(2)]
    for _ in range(3):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()
    cluster.finish()
    assert largest_difference(*(weights(replica) for replica in cluster.replicas)) == 0.0


def test_different_policies_for_buffers_are_refused() -> None:
    from overtone.exchange.buffers import Buffers
    from overtone.exchange.description import compare_descriptions, describe

    model, _ = build(0)
    said = {}
    for rank, policy in enumerate(("shared", "private")):
        about = describe(overtone.ddp(), {}, Buffers(model, policy), "raise")
        said[rank] = json.dumps(about).encode()
    with pytest.raises(MismatchError, match=r"buffer mask: 2 float32 on rank 0; 2 float32, private on rank 1"):
        compare_descriptions(said)


def test_initial_weights_that_did_not_arrive_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast that one rank missed: refused before the first step, naming the rank."""
    from overtone.sim.transport import SimTransport

    arrive = SimTransport.broadcast

    def miss(transport: SimTransport, tensors: Sequence[Tensor], *, count: Count) -> None:
        if transport.rank != 2:
            arrive(transport, tensors, count=count)

    monkeypatch.setattr(SimTransport, "broadcast", miss)
    with pytest.raises(MismatchError, match=r"the initial weights differ: .* on ranks 0, 1; .* on rank 2"):
        Cluster(build, overtone.decoupled(), replicas=3)


def test_a_residual_that_overflows_is_told_by_name() -> None:
    """A finite drift on top of a residual beyond fp32: refused at the sender, naming the parameter, now and ever after,
    until a sound state is loaded."""
    replica = Replica(*build(0), overtone.decoupled(every=1, transform="none"), Solo())
    name = "up.weight"
    place = list(replica.parameters.trainable).index(name)
    backward(replica, next(batches(0)))
    replica.step()
    sound = copy.deepcopy(replica.state_dict())
    for slab in replica.exchanger.layout.slabs:
        for chunk in range(slab.chunks):
            if not slab.plain and slab.tensor_of(chunk, 0) == place:
                part_of(replica.state.tensors["residual"], slab)[chunk, 5] = math.inf
    backward(replica, next(batches(0)))
    own, anchor = weights(replica), replica.fingerprint
    for _ in range(2):
        with pytest.raises(PeerError, match=f"rank 0 could not take part: the residual of parameter {name} is not fin"):
            run_exchange(replica.rounding(), replica.transport)
        assert replica.fingerprint == anchor
        assert all(torch.equal(tensor, own[key]) for key, tensor in weights(replica).items())
    replica.load_state_dict(sound)
    assert replica.step() is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_half_precision_weights_are_no_trouble(dtype: torch.dtype) -> None:
    """The norm of a tensor may exceed its own type's range; its drift is finite all the same."""
    model = nn.Linear(200, 200).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1000.0)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), overtone.diloco(every=1), Solo())
    model.weight.grad = torch.ones_like(model.weight)
    model.bias.grad = torch.zeros_like(model.bias)
    record = replica.step()
    assert record is not None
    assert math.isfinite(record.drift_norm)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_of_their_own() -> None:
    """`backward(create_graph=True)` leaves gradients that require gradients; a round reads and replaces them."""
    for method in (overtone.ddp(), overtone.demo()):
        replica = Replica(*build(0), method, Solo())
        x, y = next(batches(0))
        for _ in range(2):
            replica.inner.zero_grad()
            F.cross_entropy(replica.model(x), y).backward(create_graph=True)
            assert replica.step() is not None


def test_leaving_out_needs_something_to_owe() -> None:
    with pytest.raises(MethodError, match="refused='leave out': payloads that are summed on the way leave nobody out"):
        Replica(*build(0), overtone.diloco(), Solo(), refused="leave out")
    with pytest.raises(MethodError, match="refused='shrug': choose one of 'raise', 'leave out'"):
        Replica(*build(0), overtone.decoupled(), Solo(), refused="shrug")
    everything = replace(overtone.decoupled(), codec=overtone.codec.TopK(keep=4096, bits=32))
    assert "residual" not in Replica(*build(0), everything, Solo()).state.tensors
    assert "residual" in Replica(*build(0), everything, Solo(), refused="leave out").state.tensors
