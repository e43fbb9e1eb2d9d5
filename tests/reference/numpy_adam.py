"""Adam and AdamW in plain NumPy, float64, straight from the papers: no framework's code in it.

Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015 (arXiv:1412.6980),
algorithm 1. AMSGrad: Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", ICLR 2018
(arXiv:1904.09237), algorithm 2, with the bias corrections that the frameworks keep. AdamW:
Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019 (arXiv:1711.05101),
algorithm 2.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class NumpyAdam:
    """The state of one parameter: m, v, the largest v so far, and the number of steps.

    With ``decoupled``, weight decay shrinks the parameter (AdamW), else it is added to the
    gradient (Adam with L2 regularization).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled: bool = False
    exp_avg: Array | float = 0.0
    exp_avg_sq: Array | float = 0.0
    max_exp_avg_sq: Array | float = field(default=0.0)
    step: int = 0

    def update(self, theta: Array, gradient: Array) -> Array:
        """The parameter after one step, from the one before and its gradient."""
        beta1, beta2 = self.betas
        self.step += 1
        g = -gradient if self.maximize else gradient
        if self.decoupled:
            theta = theta - self.lr * self.weight_decay * theta
        else:
            g = g + self.weight_decay * theta
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * g
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * g * g
        v = self.exp_avg_sq
        if self.amsgrad:
            self.max_exp_avg_sq = np.maximum(self.max_exp_avg_sq, self.exp_avg_sq)
            v = self.max_exp_avg_sq
        m_hat = self.exp_avg / (1 - beta1**self.step)
        v_hat = v / (1 - beta2**self.step)
        return np.asarray(theta - self.lr * m_hat / (np.sqrt(v_hat) + self.eps))
