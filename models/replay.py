"""The forward pass of a network, launched as one CUDA graph where pictures of one shape come again and again.

Launching the some hundred kernels of a small network one by one takes the processor longer than the card needs to run
them. A recorded pass is launched by a single call and computes the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from utils.log import LOGGER
from utils.runtime import device_lock

RECORDED_FROM = 4  # calls with one shape; recording takes as long as some passes, so shapes that come rarely stay plain
MAX_GRAPHS = 8  # each keeps memory for its batch; further shapes stay plain
TOLERANCE = 0.01  # of a replayed pass, as a share of the largest value; usually both are equal to the last bit

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Recording:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    output: Any
    constants: Sequence[Tensor]


class Replay:
    """Calls a network, from the fourth time with images of one shape on by replaying a recorded graph.

    For inference on CUDA. Each recording is compared with the plain pass before it is used. Under autocast around the
    call, whose copies of the weights do not outlive it, and for shapes beyond the eighth the network is called the
    plain way; should recording fail, from then on always.

    Args:
        network: images (B, 3, H, W) to tensors in any nesting of lists, tuples and dicts, without waiting for the
            device.
        constants: returns the tensors that the last pass read besides weights; a graph needs them to stay.
        keeps_results: results are the caller's own; else the next call overwrites them, which saves memory.
    """

    def __init__(
        self,
        network: Callable[[Tensor], Any],
        constants: Callable[[], Sequence[Tensor]],
        *,
        keeps_results: bool = True,
    ) -> None:
        self.network, self.constants, self.keeps_results = network, constants, keeps_results
        self.calls: dict[Shape, int] = {}
        self.recordings: dict[Shape, Recording] = {}
        self.pool: tuple[int, int] | None = None
        self.is_off = False
        self._lock = threading.Lock()  # several threads may share a network, and a recording has one place for pictures
        self._is_done: torch.cuda.Event | None = None  # passes once the last result is there

    def __getstate__(self) -> dict[str, object]:
        """Leave out what belongs to this process and device."""
        return {name: getattr(self, name) for name in ("network", "constants", "keeps_results", "is_off")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["network"], state["constants"], keeps_results=state["keeps_results"])  # type: ignore[misc]
        self.is_off = state["is_off"]

    def forget(self) -> None:
        """Drop all recordings: to be called before the weights move."""
        with self._lock:
            self.calls.clear()
            self.recordings.clear()
            self.pool = None

    def __call__(self, images: Tensor) -> Any:
        """Return what the network gives for ``images``."""
        if not self._applies(images):
            return self.network(images)
        with self._lock:
            stream = torch.cuda.current_stream()
            if self._is_done is not None:
                stream.wait_event(self._is_done)  # it may be another stream than last time
            output = self._replayed(images, (tuple(images.shape), images.dtype))
            self._is_done = stream.record_event()
            return output

    def _applies(self, images: Tensor) -> bool:
        is_plain = self.is_off or torch.is_autocast_enabled("cuda") or torch.is_grad_enabled()
        return images.is_cuda and not is_plain

    def _replayed(self, images: Tensor, shape: Shape) -> Any:
        recording = self.recordings.get(shape)
        if recording is None:
            self.calls[shape] = self.calls.get(shape, 0) + 1
            if self.calls[shape] < RECORDED_FROM or len(self.recordings) >= MAX_GRAPHS:
                return self.network(images)
            return self._record(shape, images)
        recording.images.copy_(images)
        recording.graph.replay()
        return pytree.tree_map(torch.clone, recording.output) if self.keeps_results else recording.output

    def _record(self, shape: Shape, images: Tensor) -> Any:
        """Return the plain result, after the pass has been recorded."""
        expected = self.network(images)  # makes the constants of this shape, which must not be computed within a graph
        try:
            with device_lock:  # nobody may wait for the whole device meanwhile
                recording = self._captured(images)
                recording.graph.replay()
            if difference(recording.output, expected) > TOLERANCE:
                raise RuntimeError(f"a replayed pass differs by {difference(recording.output, expected):.2g}")
            self.recordings[shape] = recording
        except RuntimeError as error:  # torch's and CUDA's own kinds derive from it
            self.is_off = True
            self.recordings.clear()
            self.pool = None
            reason = str(error).splitlines()[0]
            LOGGER.warning(f"CUDA graphs are off, the network runs without them: {reason}. --no-cuda-graphs says so")
        return expected

    def _captured(self, images: Tensor) -> Recording:
        static, constants = images.clone(), tuple(self.constants())
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Only this thread is watched: others copy pictures and pin memory meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output = self.network(static)
        return Recording(graph, static, output, constants)


def difference(found: Any, expected: Any) -> float:
    """Largest difference between two nestings of tensors, as a share of the largest value of each tensor."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return max((_relative(*pair) for pair in pairs if pair[0].numel()), default=0.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    """The same for two tensors; what is not finite has to be so in both, and to be equal."""
    is_finite = torch.isfinite(expected)
    if not torch.equal(is_finite, torch.isfinite(found)):
        return float("inf")
    zero = torch.zeros((), device=expected.device)
    found, expected = (torch.where(is_finite, tensor.float(), zero) for tensor in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
