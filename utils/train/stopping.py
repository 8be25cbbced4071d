"""Early stopping."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EarlyStopping:
    """Ask to stop after ``patience`` epochs without a fitness at least as good as the best (0 = never).

    ``possible_stop`` announces one epoch ahead that the next may be the last, so that it can be validated and saved.
    """

    patience: int = 30
    best_fitness: float = 0.0
    best_epoch: int = 0
    possible_stop: bool = False

    def __call__(self, epoch: int, fitness: float) -> bool:
        """Record the fitness of ``epoch`` and tell whether to stop. Ties count as progress."""
        if fitness >= self.best_fitness:
            self.best_epoch, self.best_fitness = epoch, float(fitness)
        waited = epoch - self.best_epoch
        self.possible_stop = self.patience > 0 and waited >= self.patience - 1
        return self.patience > 0 and waited >= self.patience

    def state_dict(self) -> dict[str, float | int]:
        """Return what a resumed run needs."""
        return {
            "best_fitness": self.best_fitness,
            "best_epoch": self.best_epoch,
            "possible_stop": self.possible_stop,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Go on from :meth:`state_dict`."""
        self.best_fitness, self.best_epoch = float(state["best_fitness"]), int(state["best_epoch"])
        self.possible_stop = bool(state.get("possible_stop", False))  # absent from older files
