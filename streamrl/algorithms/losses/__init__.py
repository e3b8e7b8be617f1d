"""Policy losses, by name.

With D = logprobs - proximal_logprobs, r = exp(clamp(D, -20, 20)) and advantages A, each loss is
one number per token. After clipping it is multiplied by importance weights and sample weights, then
aggregated. Formulas are those of verl (github.com/volcengine/verl, core_algos.py) and ROLL
(github.com/alibaba/ROLL); each function names its paper.

Invariant: losses and metrics of micro-batches that share `totals` add up to those of the batch;
only clip_cov and kl_cov choose their tokens within a micro-batch.

Deliberate differences from the originals: empty sequences enter no mean (verl's gspo becomes NaN,
its geo_mean counts them); in geo_mean a sequence with zero weights contributes 0, not 1e-10 of its
loss.
"""

from streamrl.algorithms.losses.aggregation import (
    BatchTotals as BatchTotals,
    LossInput as LossInput,
    LossOutput as LossOutput,
    ObservedInput as ObservedInput,
    aggregate as aggregate,
    denominator as denominator,
    observation_loss as observation_loss,
    sft_loss as sft_loss,
    term as term,
    token_mean as token_mean,
    value_loss as value_loss,
)
from streamrl.algorithms.losses.policy import (
    POLICY_LOSSES as POLICY_LOSSES,
    PolicyLoss as PolicyLoss,
    policy_loss as policy_loss,
)
