"""A scikit-learn estimator that uses the solvers, on one rank or on many."""

from __future__ import annotations

import json
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]
from scipy.special import expit  # type: ignore[import-untyped, unused-ignore]
from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped, unused-ignore]
from sklearn.utils import check_random_state  # type: ignore[import-untyped, unused-ignore]
from sklearn.utils.metaestimators import available_if  # type: ignore[import-untyped, unused-ignore]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped, unused-ignore]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError, DisagreementError
from sparsync.published.sparcml.linear.problem import Problem, Products
from sparsync.published.sparcml.linear.solvers import SOLVERS, Solver
from sparsync.transports.agree import texts_of
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.groups import SoloCommunicator

__all__ = ["SparseLinearClassifier"]


@final
class SparseLinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Logistic regression or linear SVM by SGD or coordinate descent; one-vs-rest for many classes.

    ``batch_size``, ``lr`` and ``schedule`` are passed to ``Sgd``, ``coordinates`` to ``Scd``.

    Args:
        model: "logistic" or "svm".
        solver: "sgd" or "scd" (logistic only).
        l1: factor of the L1 penalty.
        l2: factor of the L2 penalty (scikit-learn's SGDClassifier calls it alpha).
        epochs: number of passes over the data.
        fit_intercept: whether the model has an intercept; it is not penalised.
        exchange: one of ``sparsync.published.sparcml.presets.EXCHANGES``.
        threads: number of threads on this rank.
        dtype: dtype of weights and exchanged values, "float64" or "float32".
        random_state: seed for the order of rows or coordinates.  It must be equal on all ranks, so pass
            a number, not a generator, if there are several ranks.

    Attributes:
        classes_: labels, ascending.
        coef_: `[1 or classes, features]`.
        intercept_: `[1 or classes]`.

    Example:
        >>> x, y = np.array([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]]), ["no", "yes", "no"]
        >>> SparseLinearClassifier().fit(x, y).predict([[1.0, 0.0], [0.0, 1.0]]).tolist()
        ['yes', 'no']

    On P ranks, each rank passes its own rows and all ranks get the same model::

        init_process_group()  # from sparsync.transports.launchers
        SparseLinearClassifier().fit(my_rows, my_labels, comm=sparsync.connect())
    """

    def __init__(
        self,
        model: str = "logistic",
        *,
        solver: str = "sgd",
        l1: float = 0.0,
        l2: float = 1e-4,
        epochs: int = 20,
        batch_size: int = 32,
        coordinates: int = 100,
        lr: float | None = None,
        schedule: str = "adagrad",
        fit_intercept: bool = True,
        exchange: str = "split-allgather",
        threads: int = 1,
        dtype: str = "float64",
        random_state: Any = 0,
    ) -> None:
        self.model, self.solver = model, solver
        self.l1, self.l2 = l1, l2
        self.epochs, self.batch_size, self.coordinates = epochs, batch_size, coordinates
        self.lr, self.schedule, self.fit_intercept = lr, schedule, fit_intercept
        self.exchange, self.threads, self.dtype = exchange, threads, dtype
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, comm: Communicator | None = None) -> SparseLinearClassifier:
        """Train with this rank's rows, `[rows, features]`, sparse or dense, and labels, `[rows]`.

        Args:
            X: this rank's rows; if there are several ranks, a rank may have no rows, `[0, features]`.
            y: the rows' labels, which are numbers on all ranks or strings on all ranks.
            comm: the communicator; all of its ranks call this method, each with its own rows.  None
                means a single rank.

        Raises:
            ConfigurationError: an option is invalid, or there are fewer than two classes.
            PeerError: ranks disagree, or a rank has died.
        """
        comm = comm or SoloCommunicator()
        checks = {"accept_sparse": "csr", "dtype": (np.float64, np.float32)}
        least = 1 if comm.world_size == 1 else 0  # with several ranks, a rank may have no rows
        X, y = validate_data(self, X, y, ensure_min_samples=least, **checks)
        check_classification_targets(y)
        if self.epochs < 1:
            raise ConfigurationError(f"epochs is {self.epochs}; give at least 1")
        self.classes_ = run(_all_classes(comm, np.unique(y)))
        y = y.astype(self.classes_.dtype)
        if len(self.classes_) < 2:
            raise ConfigurationError(
                f"the labels have {len(self.classes_)} class; give rows of at least two classes"
            )
        targets = self.classes_[1:] if len(self.classes_) == 2 else self.classes_
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rows, products = csr_matrix(X), Products(self.threads)
        own: dict[str, dict[str, Any]] = {
            "scd": {"coordinates": self.coordinates},
            "sgd": {"batch_size": self.batch_size, "lr": self.lr, "schedule": self.schedule},
        }
        if self.solver not in own:
            raise ConfigurationError(f"unknown solver {self.solver!r}; choose sgd or scd")
        models = []
        for target in targets:  # one class against the rest
            problem = Problem(
                rows,
                np.where(y == target, 1.0, -1.0),
                self.model,
                self.l1,
                self.l2,
                bool(self.fit_intercept),
                np.dtype(self.dtype),
            )
            solver = SOLVERS[self.solver](
                comm, problem, self.exchange, products=products, seed=seed, **own[self.solver]
            )
            run(_train(solver, self.epochs))
            models.append(solver.weights)
        self.coef_ = np.stack([weights.to_dense() for weights in models])
        self.intercept_ = np.array([weights.intercept for weights in models])
        self.n_iter_ = self.epochs
        return self

    def decision_function(self, X: Any) -> NDArray[Any]:
        """Return scores: `[rows, classes]`; for two classes `[rows]`, positive for the second class."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        scores: NDArray[Any] = X @ self.coef_.T + self.intercept_
        return scores.ravel() if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class with the highest score for each row, `[rows]`."""
        scores = self.decision_function(X)
        best = (scores >= 0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[best]
        return labels

    @available_if(lambda self: self.model == "logistic")  # type: ignore[misc, untyped-decorator, unused-ignore]
    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return probabilities, `[rows, classes]`; more than two classes: normalised one-vs-rest."""
        positive = expit(self.decision_function(X))
        if positive.ndim == 1:
            return np.stack([1 - positive, positive], axis=1)
        total = positive.sum(axis=1, keepdims=True)
        shares: NDArray[Any] = np.where(total > 0, positive, 1) / np.where(
            total > 0, total, positive.shape[1]
        )
        return shares

    def __sklearn_tags__(self) -> Any:
        """Declare that sparse rows are accepted."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


async def _train(solver: Solver, epochs: int) -> None:
    await solver.start(epochs)
    for epoch in range(epochs):
        await solver.epoch(epoch)


async def _all_classes(comm: Communicator, mine: NDArray[Any]) -> NDArray[Any]:
    """Return the union of the ranks' labels (numbers or strings) in ascending order, `[classes]`.

    Raises:
        DisagreementError: some ranks have numbers and others strings; raised on all ranks.
    """
    if comm.world_size == 1:
        return mine
    numbers = mine.dtype.kind in "biuf"
    dtype = mine.dtype.str if numbers else "O" if mine.dtype.kind == "O" else "U"
    own = json.dumps(["numbers" if numbers else "strings", dtype, mine.tolist()])
    told = {r: json.loads(text) for r, text in enumerate(await texts_of(comm, own, "classes"))}
    told = {r: theirs for r, theirs in told.items() if theirs[2]}  # ignore ranks without rows
    firsts = {kind: r for r, (kind, _, _) in reversed(told.items())}
    if len(firsts) > 1:
        said = ", ".join(f"rank {r} has {kind}" for kind, r in sorted(firsts.items()))
        raise DisagreementError(
            f"ranks disagree on the type of the labels: {said}; give all ranks the same"
        )
    if not told:
        return mine
    labels = [label for _, _, theirs in told.values() for label in theirs]
    return np.unique(np.array(labels, np.result_type(*(dtype for _, dtype, _ in told.values()))))
