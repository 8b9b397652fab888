"""Models that cannot be wrapped, and models that change under a replica's feet: refused in words, on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import overtone
import worlds
from overtone import Cluster, Replica, Solo
from overtone.errors import GaveUpError, MethodError, ModelError, OvertoneError, StateError, printable
from overtone.ledger import Count
from overtone.runs.checkpoint import format
from scenario import CONSENSUS, METHODS, SPEAKING, backward, batches, build, largest_difference, weights

# -- parameters that are not those of the start ------------------------------------------------------------------------


def assign(replica: Replica) -> None:
    values = {name: tensor.clone() for name, tensor in replica.model.state_dict().items()}
    replica.model.load_state_dict(values, assign=True)


def swap(replica: Replica) -> None:
    replica.model.down.weight = nn.Parameter(replica.model.down.weight.detach().clone())


def grow(replica: Replica) -> None:
    replica.model.add_module("extra", nn.Linear(3, 3))
    replica.inner.add_param_group({"params": list(replica.model.extra.parameters())})


def widen(replica: Replica) -> None:
    replica.inner.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def shrink(replica: Replica) -> None:
    del replica.model.unused


def exchange_places(replica: Replica) -> None:
    blocks = replica.model
    blocks.first, blocks.second = blocks.second, blocks.first


def resize(replica: Replica) -> None:
    replica.model.down.weight.data = torch.zeros(1, 1)


def other_optimizer(replica: Replica) -> None:
    replica.inner = torch.optim.SGD(copy.deepcopy(replica.model).parameters(), lr=0.1)


def add_buffer(replica: Replica) -> None:
    replica.model.register_buffer("late", torch.zeros(3))


CHANGES: dict[str, tuple[Callable[[Replica], None], str]] = {
    "assigned": (assign, "parameter conv.weight was replaced|parameter unused was replaced"),
    "replaced": (swap, "parameter down.weight was replaced by another after the Replica was built; write into it"),
    "added": (grow, "parameter extra.weight was added after the Replica was built; build a new Replica"),
    "held": (widen, r"the inner optimizer holds other parameters than .* after add_param_group\(\)"),
    "removed": (shrink, "parameter unused was removed after the Replica was built"),
    "another optimizer": (other_optimizer, "model or inner was replaced by another"),
    "a buffer": (add_buffer, "buffer late was added after the Replica was built"),
}
changes = pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)


def play(cluster: Cluster, steps: int = 1) -> None:
    for _ in range(steps):
        for replica in cluster.turns():
            backward(replica, next(batches(replica.transport.rank)))
        cluster.step()


@changes
@pytest.mark.parametrize("name", ["decoupled", "ddp", "diloco"])
def test_changed_parameters_are_refused_in_the_next_round(
    name: str, change: Callable[[Replica], None], told: str
) -> None:
    cluster = Cluster(build, METHODS[name], replicas=2)
    change(cluster.replicas[1])
    before = cluster.replicas[0].fingerprint
    with pytest.raises(GaveUpError, match=f"rank 1 could not take part: ({told})"):
        play(cluster, 3)
    assert cluster.replicas[0].fingerprint == before


@changes
@pytest.mark.parametrize("method", CONSENSUS.values(), ids=CONSENSUS)
def test_changes_after_the_last_round_do_not_pass_finish(
    method: overtone.Method, change: Callable[[Replica], None], told: str
) -> None:
    cluster = Cluster(build, method, replicas=2)
    play(cluster, method.every or 1)
    change(cluster.replicas[1])
    with pytest.raises(GaveUpError, match=f"rank 1 could not take part: ({told})"):
        cluster.finish()


@changes
def test_changes_are_refused_where_nobody_listens(change: Callable[[Replica], None], told: str) -> None:
    for method in (METHODS["decoupled"], METHODS["published"], METHODS["alone"]):
        replica = Replica(*build(0), method, Solo())
        saved = replica.state_dict()
        change(replica)
        with pytest.raises(ModelError, match=f"state_dict: ({told})"):
            replica.state_dict()
        with pytest.raises(ModelError, match=f"load_state_dict: ({told})"):
            replica.load_state_dict(saved)
        with pytest.raises(ModelError, match=f"anchor: ({told})"), replica.anchor():
            pass
        with pytest.raises((ModelError, GaveUpError), match=told):
            replica.finish()


class Parametrized(nn.Module):
    """Weight norm, a tied and a frozen matrix; a buffer that its module replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(20, 20))
        self.tied = nn.Linear(20, 20, bias=False)
        self.again = nn.Linear(20, 20, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.mean(0)
        return self.again(self.tied(self.normed(x))) + self.frozen(x)


@pytest.mark.parametrize("method", SPEAKING.values(), ids=SPEAKING)
def test_what_is_no_change(method: overtone.Method) -> None:
    """In place: another type, compiled, compiled parts, a new name, new values; frozen parameters, replaced buffers."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Parametrized()
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        return (torch.compile(model, backend="eager") if rank else model), inner

    cluster = Cluster(make, method, replicas=2)
    for step in range(6):
        for replica in cluster.turns():
            model = getattr(replica.model, "_orig_mod", replica.model)
            if step == 1:
                model.to(torch.float64).to(torch.float32)
                model.tied.compile(backend="eager")
            if step == 2:
                model.normed = torch.compile(model.normed, backend="eager")
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                replica.inner.load_state_dict(replica.inner.state_dict())
            replica.inner.zero_grad()
            replica.model(torch.ones(4, 20) * (1 + replica.transport.rank)).square().mean().backward()
        cluster.step()
    cluster.finish()
    if method.consensus:
        a, b = (list(replica.model.parameters()) for replica in cluster.replicas)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- models and optimizers that cannot be wrapped ----------------------------------------------------------------------


class Holds(nn.Module):
    """A trainable weight, and one more parameter or buffer."""

    def __init__(self, parameter: Tensor | None = None, buffer: Tensor | None = None, *, frozen: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        if parameter is not None:
            self.other = nn.Parameter(parameter, requires_grad=not frozen)
        if buffer is not None:
            self.register_buffer("table", buffer)


def wrapped(model: nn.Module, method: overtone.Method | None = None, **options: Any) -> Replica:
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return Replica(model, inner, method or overtone.decoupled(every=1), Solo(), **options)


def empty() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(0, 3))
    return model


def lazy_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d(affine=False))


UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no values": (empty, "its 1 trainable parameters have no values"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "parameter weight: on the meta device; give it values before"),
    "lazy": (lambda: nn.LazyLinear(3), "parameter weight: has no shape yet; run a batch through the model before"),
    "meta buffer": (lambda: Holds(buffer=torch.ones(3, device="meta")), "buffer table: on the meta device"),
    "lazy buffer": (lazy_batch_norm, "buffer 1.running_mean: has no shape yet"),
    "expanded": (lambda: Holds(torch.ones(3, 1).expand(3, 4), frozen=False), r"parameter other: several .* clone\(\)"),
    "expanded buffer": (lambda: Holds(buffer=torch.ones(1).expand(4)), "buffer table: several of its values share"),
    "overlapping": (lambda: Holds(torch.arange(9.0).as_strided((3, 3), (2, 1))), "parameter other: several of its"),
    "sparse": (lambda: Holds(torch.eye(3).to_sparse()), "parameter other: its layout is torch.sparse_coo"),
    "complex": (lambda: Holds(torch.ones(2, dtype=torch.complex64), frozen=False), "other: is torch.complex64"),
}


@pytest.mark.parametrize(("make", "told"), UNFIT.values(), ids=UNFIT)
def test_unfit_models_are_refused_in_words(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        wrapped(make())


def test_private_buffers_are_nobodys_business() -> None:
    wrapped(Holds(buffer=torch.ones(1).expand(4)), buffers="private")


def test_views_that_do_not_overlap_are_fit() -> None:
    base = torch.randn(6, 8, 5)
    for view in (base.transpose(0, 2), base[::2, 1:5], base.permute(1, 2, 0)[:, :1], base[:, :, 0].expand(1, 6, 8)):
        wrapped(Holds(view, frozen=False))


def test_arguments_of_another_kind() -> None:
    model, inner = build(0)
    for model_given, inner_given, told in (
        (None, inner, r"model=None: give the torch\.nn\.Module"),
        (model, None, r"inner=None: give the model's torch\.optim\.Optimizer"),
        (model, model.parameters, "inner=<bound method"),
    ):
        with pytest.raises(ModelError, match=told):
            Replica(model_given, inner_given, transport=Solo())  # type: ignore[arg-type]
    with pytest.raises(
        MethodError, match=r"transport='gloo': has no rank, .*; give Solo\(\), Torch\(group\), one of your own"
    ):
        Replica(model, inner, overtone.decoupled(), "gloo")  # type: ignore[arg-type]
    replica = Replica(model, inner, overtone.decoupled(every=1), Solo())
    backward(replica, next(batches(0)))
    for clip in ("a", 0.0, math.nan, [1.0]):
        with pytest.raises(ModelError, match=r"clip=.*: the largest gradient norm allowed, a number above 0"):
            replica.step(clip=clip)  # type: ignore[arg-type]
    assert replica.step(clip=1) is not None
    for numbers, told in (
        ({"momentum": "x"}, "momentum='x': must be a number in"),
        ({"lr": "x"}, "lr='x': the outer learning rate, .* must be a number"),
        ({"carry": None}, "carry=None: must be a number"),
        ({"every": True}, "every=True: local steps between rounds"),
        ({"drain": True}, "drain=True"),
    ):
        with pytest.raises(MethodError, match=told):
            overtone.decoupled(**numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn]
)
def test_frozen_parameters_may_be_of_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """They are broadcast and compared at the greeting, saved and restored, and never exchanged."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Holds((torch.arange(6).view(3, 2) % 5 + rank).to(dtype), torch.ones(2).to(dtype))
        return model, torch.optim.SGD([model.weight], lr=0.1)

    cluster = Cluster(make, METHODS["decoupled"], replicas=2)
    for _ in range(4):
        for replica in cluster.turns():
            replica.model.weight.grad = torch.ones(2, 3)
        cluster.step()
    first, second = (replica.model.other.detach() for replica in cluster.replicas)
    expected = make(0)[0].other.detach()
    for found in (first, second):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    tensors: dict[str, Tensor] = {}
    tree = format.flatten(format.tree_of(cluster.replicas[0]), tensors)
    format.write(tmp_path / "here" / "one", tree, tensors)
    fresh = Replica(*make(1), METHODS["decoupled"], Solo())
    format.restore(fresh, format.read(tmp_path / "here" / "one"))
    assert torch.equal(fresh.model.other.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(fresh.model.weight, cluster.replicas[0].model.weight)


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decoupled", "diloco", "ddp"])
def test_integer_buffers_that_went_away_are_told(name: str) -> None:
    def lose(model: nn.Module) -> None:
        del model.norm._buffers["num_batches_tracked"]
        model.norm.num_batches_tracked = None

    def resize(model: nn.Module) -> None:
        model.norm.num_batches_tracked = torch.zeros(2, dtype=torch.int64)

    for change in (lose, resize):
        cluster = Cluster(build, METHODS[name], replicas=2)
        for replica in cluster.replicas:
            replica.model.eval()
        change(cluster.replicas[1].model)
        told = r"buffer norm\.num_batches_tracked was removed or resized; build the Replica"
        with pytest.raises(GaveUpError, match=told):
            play(cluster, 3)
        with pytest.raises(GaveUpError, match=told):
            cluster.finish()


@pytest.mark.parametrize("name", ["decoupled", "diloco", "sparse_loco"])
def test_a_constant_nan_is_fine_and_one_that_became_so_is_not(name: str) -> None:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Holds(buffer=torch.tensor([1.0, math.nan, -math.inf]))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def play(cluster: Cluster) -> int:
        for _ in range(3):
            for replica in cluster.turns():
                replica.model.weight.grad = torch.ones(2, 3)
            done = cluster.step()
        return done[0].bytes_sent

    cluster = Cluster(make, METHODS[name], replicas=2)
    resting = play(cluster)
    for replica in cluster.replicas:
        assert replica.model.table.tolist() == pytest.approx([1.0, math.nan, -math.inf], nan_ok=True)
        replica.model.table[0] += 1.0 + replica.transport.rank
    moving = play(cluster)
    assert (moving > resting) == (name != "diloco")  # a resting buffer is one bit where messages are gathered
    for replica in cluster.replicas:
        assert replica.model.table.tolist() == pytest.approx([2.5, math.nan, -math.inf], nan_ok=True)
    cluster.replicas[1].model.table[0] = math.nan
    with pytest.raises(GaveUpError, match="rank 1 could not take part: buffer table has values that are not finite"):
        play(cluster)


# -- inside the anchor -------------------------------------------------------------------------------------------------


def test_inside_the_anchor_nothing_is_saved_loaded_or_finished() -> None:
    replica = Replica(*build(0), overtone.decoupled(every=1), Solo())
    saved = replica.state_dict()
    with replica.anchor():
        with pytest.raises(ModelError, match=r"finish: inside `with replica\.anchor\(\)`"):
            replica.finish()
        with pytest.raises(StateError, match=r"state_dict: inside `with replica\.anchor\(\)`.*save after leaving it"):
            replica.state_dict()
        with pytest.raises(StateError, match=r"load_state_dict: inside .*load after leaving it"):
            replica.load_state_dict(saved)
    replica.load_state_dict(replica.state_dict())
    replica.finish()


# -- sums that overflow ------------------------------------------------------------------------------------------------


class Overflowing(Solo):
    """The sum of everybody's finite numbers is not finite at one place."""

    place: int | None = None

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:  # noqa: ARG002
        if self.place is not None:
            buffer[self.place] = math.inf
        return buffer


@pytest.mark.parametrize("name", ["ddp", "diloco", "local_sgd"])
def test_a_sum_that_is_not_finite_touches_nothing(name: str) -> None:
    world = Overflowing()
    replica = Replica(*build(0), METHODS[name], world)
    every = replica.method.every or 1
    for _ in range(2 * every - 1):
        backward(replica, next(batches(0)))
        replica.step()
    world.place = 70  # in the batch norm's bias: 63 values of conv, then 7 of its weight
    backward(replica, next(batches(0)))
    anchor, own = replica.fingerprint, weights(replica)
    kind = "gradients" if name == "ddp" else "drifts"
    with pytest.raises(GaveUpError, match=f"the {kind} of parameter .* are finite on every rank, but their sum is not"):
        replica.step()
    assert replica.fingerprint == anchor
    if name == "ddp":
        assert largest_difference(own, weights(replica)) == 0.0
    world.place = replica.exchanger.layout.size  # the first of the buffers
    backward(replica, next(batches(0)))
    with pytest.raises(GaveUpError, match="the changes of a buffer are finite on every rank, but their sum is not"):
        replica.step()


def huge(cluster: Cluster, value: float) -> None:
    for replica in cluster.turns():
        for p in replica.model.parameters():
            p.grad = torch.zeros_like(p)
        replica.model.weight.grad[0, 0] = value


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_finite_gradients_whose_sum_overflows(name: str) -> None:
    """Refused by all before the inner optimizer steps; under a scaler skipped by all alike."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Holds()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    cluster = Cluster(make, METHODS[name], replicas=2)
    huge(cluster, 2e38)
    with pytest.raises(GaveUpError, match="the gradient is too large for a sum of 2 in fp32 at step 1"):
        cluster.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    huge(cluster, 2e38)
    cluster.step(scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for replica in cluster.replicas:
        assert torch.equal(replica.model.weight, torch.ones(2, 3))
    huge(cluster, 1.0)
    cluster.step(scaler=scaler)
    assert largest_difference(*(weights(replica) for replica in cluster.replicas)) == 0.0


# -- in real processes -------------------------------------------------------------------------------------------------


def distributed_wrappers() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    told: dict[str, str] = {}

    def attempt(name: str, model: nn.Module, inner: torch.optim.Optimizer | None = None) -> None:
        try:
            Replica(model, inner or torch.optim.SGD(model.parameters(), lr=0.1), overtone.decoupled(every=1))
            told[name] = "no error"
        except OvertoneError as error:
            told[name] = f"{type(error).__name__}: {error}"

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    mesh = init_device_mesh("cpu", (2,))
    attempt("DDP", DistributedDataParallel(plain()))
    attempt("DDP inside", nn.Sequential(DistributedDataParallel(nn.Linear(8, 8)), nn.Linear(8, 8)))
    attempt("FSDP1", FullyShardedDataParallel(plain(), device_id=torch.device("cpu")))
    attempt("FSDP2", fully_shard(plain(), mesh=mesh))
    inside = plain()
    fully_shard(inside[1], mesh=mesh)
    attempt("FSDP2 inside", inside)
    spread = plain()
    spread[0].weight = nn.Parameter(distribute_tensor(spread[0].weight.detach(), mesh, [Shard(0)]))
    attempt("DTensor", spread)
    model = plain()
    attempt("ZeRO", model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    attempt("plain", plain())
    types = (torch.int8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)
    for dtype in types:
        model = Holds((torch.arange(6).view(3, 2) % 5 + dist.get_rank()).to(dtype))
        attempt(f"frozen {dtype}", model)
        told[f"frozen {dtype}"] += f" {model.other.view(torch.uint8).tolist()}"
    return told


@pytest.mark.slow
def test_what_spreads_a_model_by_itself_is_refused(tmp_path: Path) -> None:
    for result in worlds.run(distributed_wrappers, size=2, folder=tmp_path):
        assert "value" in result, result
        told = result["value"]
        assert told.pop("plain") == "no error"
        frozen = {name: words for name, words in told.items() if name.startswith("frozen")}
        assert len(frozen) == 5
        for dtype, words in frozen.items():  # rank 0's, byte by byte
            first = torch.arange(6).view(3, 2) % 5
            expected = first.to(getattr(torch, dtype.removeprefix("frozen torch."))).view(torch.uint8).tolist()
            assert words == f"no error {expected}", dtype
        for name, words in {
            "DDP": "ModelError: model: it is wrapped in DistributedDataParallel, which averages every gradient",
            "DDP inside": "ModelError: model: module 0 is wrapped in DistributedDataParallel",
            "FSDP1": "ModelError: model: it is wrapped in FullyShardedDataParallel, which holds a shard",
            "FSDP2": "ModelError: model: it is wrapped in FSDPModule, which holds a shard",
            "FSDP2 inside": "ModelError: model: module 1 is wrapped in FSDPModule",
            "DTensor": "ModelError: parameter 0.weight: is a DTensor, spread over several ranks",
            "ZeRO": "ModelError: inner: is a ZeroRedundancyOptimizer, which broadcasts weights",
        }.items():
            assert told[name].startswith(words), told[name]
            assert "pass the plain" in told[name]


def changing() -> dict[str, str]:
    """Rank 1 alone changes its model; then everybody steps, or finishes."""
    rank = dist.get_rank()
    told: dict[str, str] = {}
    for name in ("decoupled", "diloco", "ddp", "demo"):
        for change, (act, _) in CHANGES.items():
            for verb in ("step", "finish"):
                replica = Replica(*build(rank), METHODS[name])
                stream = batches(rank)
                for _ in range(replica.method.every or 1):
                    backward(replica, next(stream))
                    replica.step()
                if rank == 1:
                    act(replica)
                before = replica.fingerprint
                try:
                    for _ in range(3 if verb == "step" else 0):
                        backward(replica, next(stream))
                        replica.step()
                    replica.finish()
                    told[f"{name} {change} {verb}"] = "no error"
                except OvertoneError as error:
                    told[f"{name} {change} {verb}"] = f"{type(error).__name__}: {error}"
                assert replica.fingerprint == before, "the anchor was touched"
    return told


@pytest.mark.slow
def test_a_change_on_one_rank_is_told_on_every_rank(tmp_path: Path) -> None:
    found = worlds.run(changing, size=2, folder=tmp_path)
    for result in found:
        assert "value" in result, result
    first, second = (result["value"] for result in found)
    assert first == second
    for words in first.values():
        assert words.startswith("GaveUpError: round 1: rank 1 could not take part: "), words
        assert "after the Replica was built" in words or "than when the Replica was built" in words


# -- words of others ---------------------------------------------------------------------------------------------------


def test_words_of_others_are_one_printable_line() -> None:
    assert printable("plain, ünïcode — fine") == "plain, ünïcode — fine"
    assert printable("\x1b[2Jgone\r\nnext\x00\u202e\x7f") == "\\x1b[2Jgone\\r\\nnext\\x00\\u202e\\x7f"
    assert printable("\udc80") == "\\udc80"
    assert len(printable("x" * 10**6)) == len(printable("\x1b" * 10**6)) == 2000
    assert printable(printable("\x1b" * 3000)) == printable("\x1b" * 3000)


def test_reasons_and_introductions_of_peers_are_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    from overtone.exchange.consensus import _read_dispute
    from overtone.exchange.description import compare_descriptions
    from overtone.exchange.message import Header, Kind, Message
    from overtone.exchange.parameters import Parameters

    evil = "\x1b]0;owned\x07\nrank 0: all is well"
    for name in ("decoupled", "diloco"):
        cluster = Cluster(build, METHODS[name], replicas=2)
        with monkeypatch.context() as patch:
            patch.setattr(Parameters, "changed", lambda *_: evil)
            with pytest.raises(GaveUpError) as caught:
                play(cluster, 3)
        assert str(caught.value).isprintable()
    with pytest.raises(OvertoneError) as refused:
        compare_descriptions({0: b'{"a": 1}', 1: b'{"a": "\\u001b[2J", "\\u001b": "\\n"}'})
    assert str(refused.value).isprintable()
    header = Header(Kind.DISPUTE, 0, 0, 0, bytes(8), bytes(8), bytes(8), bytes(8))
    dispute = _read_dispute(Message(header, b'{"marks": {"0": "\\u001b"}, "refused": {"1": "\\u001b[2J"}}', b""))
    assert dispute.refused[1].isprintable()
    assert dispute.marks[0].isprintable()


def test_the_gradient_that_nobody_has_stays_none() -> None:
    replica = Replica(*build(0), overtone.ddp(), Solo())
    x, y = next(batches(0))
    (F.cross_entropy(replica.model(x), y) * 0.0).backward()
    replica.step()
    assert replica.model.unused.grad is None
    assert replica.model.up.weight.grad is not None


def test_a_step_that_one_scaler_skips_is_skipped_without_one_too() -> None:
    cluster = Cluster(build, overtone.ddp(), replicas=2)
    for replica in cluster.turns():
        backward(replica, next(batches(0)))
    cluster.replicas[1].model.up.weight.grad[0, 0] = math.inf
    before = [weights(replica) for replica in cluster.replicas]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    cluster.replicas[0].local_step()
    cluster.replicas[1].local_step(scaler=scaler)
    cluster.run_exchanges({replica.transport.rank: replica.rounding() for replica in cluster.replicas}, "rounds")
    for replica, own in zip(cluster.replicas, before, strict=True):
        mine = {name: tensor for name, tensor in weights(replica).items() if "norm" not in name}
        assert largest_difference(mine, {name: own[name] for name in mine}) == 0.0


class Twins(nn.Module):
    """Two equal layers, statistics, and a teacher that follows them by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.teacher = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.norm(self.first(x)))
        return found


def twins(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Twins()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_twins(cluster: Cluster, steps: int) -> None:
    for step in range(steps):
        for replica in cluster.turns():
            torch.manual_seed(100 * step + replica.transport.rank)
            replica.inner.zero_grad()
            replica.model(torch.randn(8, 4)).square().mean().backward()
        cluster.step()


def test_parameters_that_change_places_are_refused() -> None:
    cluster = Cluster(twins, METHODS["decoupled"], replicas=2)
    exchange_places(cluster.replicas[1])
    with pytest.raises(GaveUpError, match=r"first\.weight changed its place with another"):
        train_twins(cluster, METHODS["decoupled"].every or 1)


def test_a_parameter_of_another_shape_is_told() -> None:
    replica = Replica(*build(0), METHODS["decoupled"], Solo())
    resize(replica)
    with pytest.raises(ModelError, match=r"parameter down\.weight is \(1, 1\) and was \("):
        replica.state_dict()


def test_two_parameters_with_one_memory_are_refused() -> None:
    model = Twins()
    model.second.weight.data = model.first.weight.data
    with pytest.raises(ModelError, match=r"parameters first\.weight and second\.weight: share their memory"):
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=Solo())


@pytest.mark.parametrize("name", CONSENSUS)
def test_after_finish_frozen_parameters_are_equal_too(name: str) -> None:
    """A teacher that each replica moved by itself: the first replica's counts, and nothing travels if all are equal."""
    sent = []
    for moved in (False, True):
        cluster = Cluster(twins, METHODS[name], replicas=2)
        train_twins(cluster, 4)
        for replica in cluster.replicas:
            replica.model.teacher.data.fill_(float(replica.transport.rank) if moved else 1.0)
        cluster.finish()
        first, second = (replica.model.state_dict() for replica in cluster.replicas)
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
        sent.append(cluster.replicas[0].transport.ledger.sent)
    assert sent[1] > sent[0]


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_statistics_are_equal_after_a_last_step_that_was_skipped(name: str) -> None:
    cluster = Cluster(twins, METHODS[name], replicas=2)
    train_twins(cluster, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for replica in cluster.turns():
        torch.manual_seed(7 + replica.transport.rank)
        replica.inner.zero_grad()
        scaler.scale(replica.model(torch.randn(8, 4)).square().mean()).backward()
        if replica.transport.rank:
            replica.model.first.weight.grad.fill_(math.inf)
    cluster.step(scaler=scaler)
    one, other = (replica.model.norm.running_mean for replica in cluster.replicas)
    assert not torch.equal(one, other)
    cluster.finish()
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["decoupled", "diloco", "ddp"])
def test_what_happens_inside_the_anchor_stays_there(name: str) -> None:
    """Other memory, another type and back, a forward pass that counts: the replica's own model comes back."""
    replica = Replica(*twins(0), overtone.METHODS[name](**({} if name == "ddp" else {"every": 3})), Solo())
    for _ in range(4):
        replica.inner.zero_grad()
        replica.model(torch.randn(8, 4)).square().mean().backward()
        replica.step()
    before = copy.deepcopy(replica.model.state_dict())
    with replica.anchor() as model:
        model.double()
        model(torch.randn(8, 4, dtype=torch.float64))
        model.float()
        for p in model.parameters():
            p.data = p.data.clone()
    after = replica.model.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
