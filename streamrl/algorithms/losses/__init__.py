"""Policy losses, by name.

With r = exp(clamp(D, -20, 20)), D = logprobs - proximal_logprobs and A the advantages, each loss
is a number per token; importance weights and sample weights multiply it after clipping, before it
is aggregated. Formulas as in verl (github.com/volcengine/verl, core_algos.py) and ROLL
(github.com/alibaba/ROLL); each function names its paper.

Invariant: losses and metrics of micro-batches that share `totals` add up to those of the batch;
only clip_cov and kl_cov pick their tokens within a micro-batch.

Different from the originals on purpose: empty sequences are in no mean (verl's gspo becomes NaN,
its geo_mean counts them); in geo_mean a sequence of zero weights contributes 0, not 1e-10 of it.
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
