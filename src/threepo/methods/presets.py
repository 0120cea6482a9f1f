"""The named points of the lattice (method.md); every one is a `Method`, and more can be made the same way.

import dataclasses, threepo
two_draws = dataclasses.replace(threepo.C3PO, draws=2)
"""

from threepo.config import Correction, Method

GRPO = Method(name="grpo")
"""The mean generates, the mean is updated (paper section 2.1)."""

B3PO = Method(name="b3po", draws=1, gradient_at="generator", optimizer="ivon")
"""One draw of the weights a step; gradient at that draw (paper section 3.1)."""

M3PO = Method(name="m3po", draws=4, advantages="draw", gradient_at="generator", normalize="part", optimizer="ivon")
"""M draws, each with its own advantage groups; gradients averaged over draws (paper section 3.1). As in the paper's
main table the rollouts are shared out: 16 = 4 draws of 4."""

C3PO = Method(name="c3po", draws=4, gradient_at="fresh", correction=Correction(kind="seq_mis"), optimizer="ivon")
"""A prompt's group is split over N draws, advantages are pooled, the gradient is taken at a fresh draw and corrected
by Seq-MIS on [0.5, 2] (paper section 3.2)."""

C3PO_REPLAY = Method(name="c3po_replay", draws=4, gradient_at="generator", optimizer="ivon")
"""C3PO with every row's gradient at the draw that generated it: on-policy, so no correction is needed. The paper
names it and rules it out for its memory; addressed noise makes it free."""

THOMPSON = Method(name="thompson", draws=16, gradient_at="fresh", greedy=True, optimizer="ivon")
"""One greedy rollout per draw: all exploration is in weight space (paper appendix, "A limiting case")."""

PRESETS = {method.name: method for method in (GRPO, B3PO, M3PO, C3PO, C3PO_REPLAY, THOMPSON)}
