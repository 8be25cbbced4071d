"""The forward pass of a network, launched as one CUDA graph where pictures of one shape come again and again.

Launching the some hundred kernels of a small network one by one takes the processor longer than the card needs to run
them. A recorded pass is launched by a single call and computes the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from utils.runtime import GraphPool, device_lock

PLAIN_CALLS = 3  # with one shape before it is recorded, which takes as long as some passes
RESERVE_BYTES = 1 << 30  # of the card that have to be free beside what a recording keeps
TOLERANCE = 0.01  # of a replayed pass, as a share of the largest value; usually both are equal to the last bit
LEAST_VALUE = 1e-3  # where all values of a tensor are smaller, differences are seen as shares of this

Network = Callable[[Tensor], Any]
Shape = tuple[tuple[int, ...], torch.dtype, torch.device]


@dataclass
class Recording:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    output: Any
    constants: Sequence[Tensor]


class Replay:
    """Calls a network, and replays a recorded graph instead where a shape comes again and again.

    For inference on CUDA. After three plain passes of a shape the next one is recorded as well. A recording is only
    used if it computes what the plain pass gave. What cannot or should not be recorded goes the plain way: calls under
    autocast, whose cache of converted weights ends before a replay; calls that are being captured, traced or compiled;
    shapes beyond ``most``, and all while the card has little free memory. Hooks of modules run in plain passes only.

    Args:
        is_off: every call goes the plain way.
        most: recordings, each of which keeps the memory of its results.
        keeps_results: results are the caller's own; else the next call overwrites them.
        pool: memory of the passes, shared with graphs that never run at the same time.
    """

    def __init__(
        self, *, is_off: bool = False, most: int = 8, keeps_results: bool = True, pool: GraphPool | None = None
    ) -> None:
        self.is_off, self.most, self.keeps_results, self.pool = is_off, most, keeps_results, pool or GraphPool()
        self.calls: dict[Shape, int] = {}
        self.recordings: dict[Shape, Recording] = {}
        self._weights: Hashable = None
        self._lock = threading.Lock()  # several threads may share a network, and a recording has one place for pictures
        self._stream: torch.cuda.Stream | None = None  # to record on
        self._is_done: torch.cuda.Event | None = None  # passes once the last result is there

    def __getstate__(self) -> dict[str, object]:
        """Leave out what belongs to this process and device."""
        return {"is_off": self.is_off, "most": self.most, "keeps_results": self.keeps_results}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __call__(
        self,
        network: Network,
        images: Tensor,
        *,
        weights: Hashable,
        constants: Callable[[], Sequence[Tensor]],
    ) -> Any:
        """Return what ``network`` gives for ``images``.

        Args:
            network: images (B, 3, H, W) to tensors in any nesting of lists, tuples and dicts, without waiting for the
                device. It has to compute the same at every call, but for the values of its weights.
            weights: something that changes when weights move in memory or are replaced.
            constants: returns the tensors that the last pass read besides weights; a graph needs them to stay.
        """
        if not self._applies(images):
            return network(images)
        with self._lock, torch.cuda.device(images.device):
            stream = torch.cuda.current_stream()
            if self._is_done is not None:
                stream.wait_event(self._is_done)  # it may be another stream than last time
            if weights != self._weights:
                self._forget()
                self._weights = weights
            output = self._replayed(network, images, constants)
            self._is_done = stream.record_event()
            return output

    def _applies(self, images: Tensor) -> bool:
        if self.is_off or not images.is_cuda or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
            return False
        is_recorded_elsewhere = torch.cuda.is_current_stream_capturing() or torch.jit.is_tracing()
        return not is_recorded_elsewhere and not torch.compiler.is_compiling()

    def _forget(self) -> None:
        self.calls.clear()
        self.recordings.clear()
        self._is_done = None

    def _replayed(self, network: Network, images: Tensor, constants: Callable[[], Sequence[Tensor]]) -> Any:
        shape = (tuple(images.shape), images.dtype, images.device)
        recording = self.recordings.get(shape)
        if recording is None:
            self.calls[shape] = self.calls.get(shape, 0) + 1
            expected = network(images)  # makes the constants of this shape, which must not be computed within a graph
            if self.calls[shape] > PLAIN_CALLS and len(self.recordings) < self.most and has_room(images, expected):
                self._record(shape, network, images, expected, constants())
            return expected
        recording.images.copy_(images)
        recording.graph.replay()
        return pytree.tree_map(torch.clone, recording.output) if self.keeps_results else recording.output

    def _record(
        self, shape: Shape, network: Network, images: Tensor, expected: Any, constants: Sequence[Tensor]
    ) -> None:
        try:
            with device_lock:  # nobody may wait for the whole device meanwhile
                recording = self._captured(network, images, constants)
                for tensor in pytree.tree_leaves(recording.output):
                    tensor.fill_(float("nan"))  # so that a graph in which nothing was recorded is noticed
                recording.graph.replay()
            if (off := difference(recording.output, expected)) > TOLERANCE:
                raise RuntimeError(f"a replayed pass differs by {off:.2g}")
            self.recordings[shape] = recording
        except RuntimeError as error:  # torch's and CUDA's own kinds derive from it
            self.is_off = True
            self.pool.give_up(self.recordings, "inference", error)

    def _captured(self, network: Network, images: Tensor, constants: Sequence[Tensor]) -> Recording:
        self._stream = self._stream or torch.cuda.Stream(images.device)
        graph = torch.cuda.CUDAGraph()
        # Tensors of inference mode could not be written to by a call outside of it.
        with torch.inference_mode(False), torch.no_grad():
            static = torch.empty_like(images).copy_(images)
            # Only this thread is watched: others copy pictures and pin memory meanwhile.
            with torch.cuda.graph(
                graph, pool=self.pool.handle(), stream=self._stream, capture_error_mode="thread_local"
            ):
                output = network(static)
        return Recording(graph, static, output, tuple(constants))


def has_room(images: Tensor, output: Any) -> bool:
    """Whether the card has room for what a recording keeps, and some more for whoever needs it later."""
    kept = sum(tensor.nbytes for tensor in (images, *pytree.tree_leaves(output)))
    return torch.cuda.mem_get_info(images.device)[0] > 2 * kept + RESERVE_BYTES


def difference(found: Any, expected: Any) -> float:
    """Largest difference between two nestings of tensors, as a share of the largest value of each tensor."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return max((_relative(*pair) for pair in pairs if pair[0].numel()), default=0.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    """The same for two tensors; what is not finite has to be so in both."""
    is_finite = torch.isfinite(expected)
    if not torch.equal(is_finite, torch.isfinite(found)):
        return float("inf")
    zero = torch.zeros((), device=expected.device)
    found, expected = (torch.where(is_finite, tensor.float(), zero) for tensor in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(LEAST_VALUE))
