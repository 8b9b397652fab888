"""Train one model on many machines joined by thin wires.

inner   = torch.optim.AdamW(model.parameters(), lr=3e-4)
replica = overtone.Replica(model, inner, overtone.decoupled(every=64))
for batch in data:
    model(batch).backward()
    replica.step()            # was: inner.step()
    inner.zero_grad()
replica.finish()
"""

from importlib import import_module
from typing import TYPE_CHECKING

from overtone.errors import (
    CheckpointError,
    ConfigError,
    DamagedLogWarning,
    EnvironmentVariableError,
    FileNameError,
    GaveUpError,
    MachineError,
    MethodError,
    MismatchError,
    ModelError,
    NotALogError,
    NotFiniteError,
    OvertoneError,
    OvertoneWarning,
    PeerError,
    RelayedError,
    ReplicaError,
    RunError,
    RunLogError,
    StateError,
    StoreError,
    StreamError,
    TaskError,
    UnfitRunError,
    WireError,
)
from overtone.version import __version__

# The names below need torch, which takes seconds to import. They are imported when somebody asks for them, so that
# `overtone --help` and `overtone --version` answer at once. Type checkers read the imports, Python reads the table.
if TYPE_CHECKING:
    from overtone.ledger import Count, Ledger, Round
    from overtone.methods import METHODS, Method, alone, ddp, decoupled, demo, diloco, local_sgd, published, sparse_loco
    from overtone.replica import Replica
    from overtone.sim.cluster import Cluster
    from overtone.sim.network import Absence, Link
    from overtone.swarm.store import Store
    from overtone.transport import Solo
    from overtone.world.join import connect
    from overtone.world.process_group import Torch
else:
    _NAMES_OF = {
        "ledger": ("Count", "Ledger", "Round"),
        "methods": (
            "METHODS", "Method", "alone", "ddp", "decoupled", "demo", "diloco", "local_sgd", "published", "sparse_loco",
        ),
        "replica": ("Replica",),
        "sim.cluster": ("Cluster",),
        "sim.network": ("Absence", "Link"),
        "swarm.store": ("Store",),
        "transport": ("Solo",),
        "world.join": ("connect",),
        "world.process_group": ("Torch",),
    }  # fmt: skip
    _MODULE_OF = {name: f"overtone.{module}" for module, names in _NAMES_OF.items() for name in names}
    # `import overtone` alone is enough to reach these modules, such as `overtone.rules.Outer`.
    _MODULES = (
        "codec",
        "coding",
        "exchange",
        "ledger",
        "methods",
        "replica",
        "rules",
        "sim",
        "swarm",
        "transport",
        "world",
    )

    def __getattr__(name):
        """Import a public name, or a module of the library, on first use (PEP 562)."""
        if name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        elif name in _MODULES:
            value = import_module(f"overtone.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)


__all__ = [
    "METHODS",
    "Absence",
    "CheckpointError",
    "Cluster",
    "ConfigError",
    "Count",
    "DamagedLogWarning",
    "EnvironmentVariableError",
    "FileNameError",
    "GaveUpError",
    "Ledger",
    "Link",
    "MachineError",
    "Method",
    "MethodError",
    "MismatchError",
    "ModelError",
    "NotALogError",
    "NotFiniteError",
    "OvertoneError",
    "OvertoneWarning",
    "PeerError",
    "RelayedError",
    "Replica",
    "ReplicaError",
    "Round",
    "RunError",
    "RunLogError",
    "Solo",
    "StateError",
    "Store",
    "StoreError",
    "StreamError",
    "TaskError",
    "Torch",
    "UnfitRunError",
    "WireError",
    "__version__",
    "alone",
    "connect",
    "ddp",
    "decoupled",
    "demo",
    "diloco",
    "local_sgd",
    "published",
    "sparse_loco",
]
