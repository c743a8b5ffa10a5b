"""Metrics under the names "glue" and "accuracy", for `evaluate.load`: accuracy, and F1 of label 1.

Copied into a local hub; the library imports it from there.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate


class Metric(evaluate.Metric):  # type: ignore[misc]
    """Shares of labels."""

    def _info(self) -> Any:
        column = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="",
            citation="",
            features=datasets.Features({"predictions": column, "references": column}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        hits = sum(predicted == reference for predicted, reference in pairs)
        positive = sum(predicted == reference == 1 for predicted, reference in pairs)
        claimed = sum(predicted == 1 for predicted, _ in pairs)
        wanted = sum(reference == 1 for _, reference in pairs)
        f1 = 2 * positive / (claimed + wanted) if claimed + wanted else 0.0
        return {"accuracy": hits / len(pairs), "f1": f1}
