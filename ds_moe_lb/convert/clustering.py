"""Balanced k-means: clusters of equal size on the rows of a weight matrix.

Shape legend: N rows, D columns, E clusters of N / E rows.
"""

import numpy as np
import torch
from torch import Tensor

MAX_ITERATIONS = 500
_SMALLEST_GAIN = 1e-9


def balanced_k_means(rows_ND: Tensor, *, num_clusters: int, random: np.random.Generator) -> Tensor:
    """Cluster L2-normalised rows by squared distance, every cluster with N / E of them.

    Both steps of an iteration lower the cost or leave it: centroids become means, and rows change
    places in pairs as long as that gains. It ends when no row moves.

    Args:
        rows_ND: any float dtype.
        num_clusters: E, a divisor of N.
        random: draws the first centroids.

    Returns:
        ``(N,)`` int64, the cluster of each row.
    """
    rows_ND = torch.nn.functional.normalize(rows_ND.float(), dim=1)
    centroids_ED = _first_centroids(rows_ND, num_clusters=num_clusters, random=random)
    labels_N = _fill_in_order_of_regret(_distances(rows_ND, centroids_ED))
    for _ in range(MAX_ITERATIONS):
        before_N = labels_N.clone()
        labels_N = swap_until_no_gain(_distances(rows_ND, centroids_ED), labels_N)
        centroids_ED = _means(rows_ND, labels_N, num_clusters)
        if torch.equal(before_N, labels_N):
            break
    return labels_N


def swap_until_no_gain(costs_NE: Tensor, labels_N: Tensor) -> Tensor:
    """Exchange rows between pairs of clusters until no pair of clusters gains by it.

    For two clusters this ends at the cheapest assignment with these sizes; for more, at one that no
    exchange between two clusters makes cheaper.

    Args:
        costs_NE: cost of each row in each cluster.
        labels_N: int64, an assignment; left as it is.

    Returns:
        A new assignment with the same cluster sizes.
    """
    labels_N = labels_N.clone()
    num_clusters = costs_NE.shape[1]
    has_moved = True
    while has_moved:
        has_moved = False
        for a in range(num_clusters):
            for b in range(a + 1, num_clusters):
                in_a = (labels_N == a).nonzero().squeeze(1)
                in_b = (labels_N == b).nonzero().squeeze(1)
                gain_a, order_a = (costs_NE[in_a, a] - costs_NE[in_a, b]).sort(descending=True)
                gain_b, order_b = (costs_NE[in_b, b] - costs_NE[in_b, a]).sort(descending=True)
                pairs = min(len(gain_a), len(gain_b))
                moves = int((gain_a[:pairs] + gain_b[:pairs] > _SMALLEST_GAIN).sum())
                if moves:
                    labels_N[in_a[order_a[:moves]]] = b
                    labels_N[in_b[order_b[:moves]]] = a
                    has_moved = True
    return labels_N


def _first_centroids(rows_ND: Tensor, *, num_clusters: int, random: np.random.Generator) -> Tensor:
    """k-means++: each next one is drawn in proportion to the squared distance to those so far."""
    chosen = [int(random.integers(len(rows_ND)))]
    nearest_N = _distances(rows_ND, rows_ND[chosen]).squeeze(1)
    while len(chosen) < num_clusters:
        weights = nearest_N.clamp_min(0).double().numpy()
        if weights.sum() == 0:  # fewer different rows than clusters
            weights = np.ones_like(weights)
        chosen.append(int(random.choice(len(rows_ND), p=weights / weights.sum())))
        nearest_N = torch.minimum(nearest_N, _distances(rows_ND, rows_ND[chosen[-1:]]).squeeze(1))
    return rows_ND[chosen]


def _fill_in_order_of_regret(costs_NE: Tensor) -> Tensor:
    """Rows that would lose most by their second choice choose first; full clusters are closed."""
    best_two_N2 = costs_NE.topk(2, dim=1, largest=False).values
    order = (best_two_N2[:, 1] - best_two_N2[:, 0]).argsort(descending=True, stable=True)
    preferences = costs_NE.argsort(dim=1, stable=True).numpy()
    num_rows, num_clusters = costs_NE.shape
    free = np.full(num_clusters, num_rows // num_clusters)
    labels = np.empty(num_rows, dtype=np.int64)
    for row in order.tolist():
        cluster = next(c for c in preferences[row] if free[c])
        labels[row] = cluster
        free[cluster] -= 1
    return torch.from_numpy(labels)


def _distances(rows_ND: Tensor, centroids_ED: Tensor) -> Tensor:
    """Squared distances ``(N, E)``."""
    return torch.cdist(rows_ND, centroids_ED).square()


def _means(rows_ND: Tensor, labels_N: Tensor, num_clusters: int) -> Tensor:
    sums_ED = torch.zeros(num_clusters, rows_ND.shape[1]).index_add_(0, labels_N, rows_ND)
    return sums_ED * (num_clusters / len(rows_ND))
