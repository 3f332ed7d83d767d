# SPDX-License-Identifier: Apache-2.0
"""What of a recording can be lost without the rest.

Where a release of vLLM moved or reshaped one method, only the tables that need it are lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from profilemate.hooks.instances import Undo
from profilemate.record.recorder import Recorder


class Part:
    """Hooks whose tables are lost together: one of ``events.PARTS``.

    These hooks use it in place of the recorder. ``carried`` are parts that are lost with this one;
    ``on_loss`` is called when it is lost.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        *carried: Part,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self.keep = recorder.keep
        self.lost = False
        self._recorder = recorder
        self._name = name
        self._carried = carried
        self._on_loss = on_loss
        self._undo: list[Undo] = []
        recorder.on_stop(self._take_away)

    def on_stop(self, undo: Undo) -> None:
        """Call ``undo``, which takes a hook away, when this part is lost or the recorder stops."""
        self._undo.append(undo)

    def fail(self, where: str, error: BaseException) -> None:
        """A hook of this part raised: the part is lost. Raises nothing, as vLLM would get it."""
        try:
            self._lose(where, error)
        except Exception as another:
            self._recorder.fail(where, another)

    def _lose(self, where: str, error: BaseException) -> None:
        lost = [part for part in (self, *self._carried) if not part.lost]
        for part in lost:
            part.lost = True
            part._take_away()
            part._on_loss()
        if self in lost:
            self._recorder.lose([part._name for part in lost], where, error)

    def stay_lost(self) -> None:
        """The part was lost before, and has been said to be."""
        self.lost = True
        self._on_loss()

    def leave_if_lost(self) -> None:
        """Take the hooks of a part away that is lost."""
        if self.lost:
            self._take_away()

    @contextlib.contextmanager
    def attaching(self) -> Iterator[None]:
        """Lose the part where its hooks cannot be attached."""
        try:
            yield
        except Exception as error:
            self.fail("attaching", error)

    def _take_away(self) -> None:
        # Taken one by one: another thread may be at it, too.
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop(0)()
