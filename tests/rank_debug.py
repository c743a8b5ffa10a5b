from stronghold.runtime.ranks import gathers
from stronghold.runtime import executor

old = gathers.Gathers.note


def note(self, op):
    print("NOTE", op, flush=True)
    old(self, op)


gathers.Gathers.note = note
oldu = executor.Executor.begin_use


def begin_use(self, layer, kind):
    print(
        "USE",
        kind.value,
        layer,
        "cursor",
        self._current.cursor,
        "held",
        sorted(self._window.held_layers()),
        flush=True,
    )
    oldu(self, layer, kind)


executor.Executor.begin_use = begin_use
from tests.rank_laws import choose
