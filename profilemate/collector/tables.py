# SPDX-License-Identifier: Apache-2.0
"""The CSV and JSON-lines tables: their columns, and files that rows are appended to."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable

from profilemate.format.cells import plain
from profilemate.format.folder import Folder

COLUMNS = {
    "kv_cache_usage.csv": (
        "timestamp_sec,usage_pct,num_blocks,total_blocks,cached_blocks,free_blocks,"
        "running_reqs,waiting_reqs,engine,pool"
    ),
    "kv_cache_allocations.csv": (
        "timestamp_sec,event,num_blocks,request_id,evicted_blocks,step,engine,pool,group"
    ),
    "kv_cache_evictions.csv": (
        "timestamp_sec,lifetime_sec,idle_sec,evictable_sec,block_id,reuse_count,reason,"
        "content_id,copies_left,origin,owner_request,evicting_request,engine,pool,group"
    ),
    "prefix_cache_lookups.csv": (
        "timestamp_sec,request_id,query_tokens,hit_tokens,external_hit_tokens,kind,admitted,"
        "lookups,engine"
    ),
    "scheduler_steps.csv": (
        "timestamp_sec,step,running_reqs,waiting_reqs,scheduled_tokens,prefill_tokens,"
        "decode_tokens,scheduled_reqs,preempted_reqs,finished_reqs,schedule_us,repeats,engine,"
        "encoder_items,encoder_tokens"
    ),
    "requests.jsonl": None,
    "cuda_graph_captures.csv": (
        "runtime_mode,num_tokens,num_reqs,uniform,has_lora,capture_time_sec,duration_sec,"
        "num_graphs,memory_bytes,source,kind,worker,part"
    ),
    "cuda_graph_usage.csv": (
        "runtime_mode,num_tokens,num_reqs,uniform,has_lora,replay_count,total_launch_sec,"
        "total_gpu_sec,worker,num_graphs,source,part,dummy_count,capture_time_sec"
    ),
    "cuda_graph_timeline.csv": (
        "timestamp_sec,runtime_mode,num_tokens,num_reqs,uniform,has_lora,unpadded_tokens,"
        "launch_us,gpu_us,dummy,worker,num_graphs"
    ),
    "gpu_memory.csv": "timestamp_sec,gpu,used_bytes,free_bytes,utilization_pct",
    "gpu_steps.csv": (
        "timestamp_sec,worker,prefill_tokens,decode_tokens,prefill_reqs,decode_reqs,gpu_us,"
        "encoder_items,encoder_us"
    ),
    "moe_experts.csv": "timestamp_sec,since_sec,worker,layer,tokens,by_expert,by_rank",
    "moe_pairs.csv": (
        "timestamp_sec,worker,layer,expert,other_expert,routed_tokens,pair_tokens,expected_tokens,"
        "expert_tokens,other_expert_tokens"
    ),
}
"""Header line of each table; a JSON-lines table has none."""

LONGEST_ROW = 4096
"""More bytes than a row has that holds no client's text."""

_NEEDS_QUOTES = re.compile(r'[",]')

Append = Callable[[str], None]
Extend = Callable[[Iterable[str]], None]


class Tables:
    """Tables in one folder, each made when its first row comes.

    ``bytes_written`` counts all bytes, ``open_bytes`` those of the files that are here. Rows wait
    for ``flush``. A table's ``append`` takes a whole row without its line end, or several with line
    ends between them.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.bytes_written = 0
        self.open_bytes = 0
        self._rows: dict[str, list[str]] = {name: [] for name in COLUMNS}
        self._fds: dict[str, int] = {}

    def append(self, table: str) -> Append:
        """The function that takes a row of this table, or several as one text."""
        return self._rows[table].append

    def extend(self, table: str) -> Extend:
        """The function that takes rows of this table."""
        return self._rows[table].extend

    def flush(self) -> None:
        """Write the rows that have been appended.

        Raises:
            OSError: the disk is full, or the folder is gone. A table has all of its rows or none of
                them; those that are not written wait on.

        """
        for table, rows in self._rows.items():
            if rows:
                # One copy of the text less than to append a line's end to it.
                ended = "\n".join([*rows, ""])
                self._write(table, ended.encode("utf-8", "backslashreplace"))
                rows.clear()

    def cut(self, closing: Folder) -> None:
        """Move all files into another folder; rows that follow make new ones.

        Raises:
            OSError: they cannot be moved. Those that were go on there until the next call.

        """
        self.flush()
        there = closing.names()
        for table in self._fds:
            if table not in there:
                self.folder.rename(table, table, closing)
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self.open_bytes = 0

    def begin_anew(self, kept: str) -> None:
        """Remove the files that are here, whose rows come again, but for the table ``kept``, which
        goes on."""
        for table in COLUMNS:
            if table != kept:
                self.folder.remove(table)
        cut_torn_row(self.folder, kept)
        if self.folder.has(kept):
            self._fds[kept] = self.folder.open(kept, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        """Write what is left and close the files."""
        self.flush()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _write(self, table: str, data: bytes) -> None:
        fd = self._fds.get(table)
        is_new = fd is None
        if fd is None:
            fd = self.folder.open(table, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            header = COLUMNS[table]
            if header is not None:
                data = header.encode() + b"\n" + data
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            size = os.fstat(fd).st_size - (len(data) - len(view))
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
                os.lseek(fd, size, os.SEEK_SET)
            if is_new:
                os.close(fd)
                self.folder.remove(table)
            raise
        self._fds[table] = fd
        self.bytes_written += len(data)
        self.open_bytes += len(data)


def text_cell(text: str) -> str:
    """A CSV cell for text that a client controls, quoted as RFC 4180 says where it has to be.

    >>> text_cell("=1+1"), text_cell("a,b")
    ("'=1+1", '"a,b"')
    """
    text = plain(text)
    if _NEEDS_QUOTES.search(text):
        text = '"' + text.replace('"', '""') + '"'
    return text


def whole_rows(folder: Folder, table: str) -> int:
    """How many rows of a table end in a line end; none where there is no such table."""
    if not folder.has(table):
        return 0
    with open(folder.open(table, os.O_RDONLY), "rb") as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    return max(0, lines - (COLUMNS[table] is not None))


def cut_torn_row(folder: Folder, table: str) -> None:
    """Remove the last row of a CSV table if a full disk cut it short."""
    if not folder.has(table):
        return
    with open(folder.open(table, os.O_RDWR), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, size - LONGEST_ROW))
        size = begin + file.read().rfind(b"\n") + 1
        file.truncate(size)
    if not size:
        folder.remove(table)
