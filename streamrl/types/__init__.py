"""What crosses a process: frozen records with numpy arrays, checked where they are made.

Invariant: a record that exists is well formed. `__post_init__` runs on construction and again on
decode, so no reader checks shapes a second time. Nothing here is ever changed in place.
"""

from msgspec.structs import replace

from streamrl.types.buffer import (
    MAX_AWAITED,
    MAX_RETRIED,
    MIN_RETRIED_LEASES,
    Books,
    BufferStats,
    GeneratorStatus,
    HeartbeatReply,
    LearnerActivity,
    LearnerStatus,
    Lease,
    Loan,
    OverduePolicy,
    RetriedPrompt,
    SchedulingState,
    admission_capacity,
)
from streamrl.types.failures import MAX_FAILED_ROWS, FailedReward, FailedRow, GroupFailure
from streamrl.types.index_ranges import IndexRanges, ranges_of
from streamrl.types.lengths import (
    LengthHistogram,
    ResponseLengths,
    distance_p_value,
    length_distance,
    rounded_length,
)
from streamrl.types.media import Media
from streamrl.types.packed import PackedGroup, pack
from streamrl.types.parity import GapStatistics, ParityReport, ParitySamples
from streamrl.types.ranges import (
    MAX_GROUPS,
    MAX_NAMES,
    Count,
    Name,
    NumGroups,
    PolicyVersion,
    Port,
    PromptIndex,
    Text,
    WaitSeconds,
)
from streamrl.types.reasons import DropReason, RefusalReason
from streamrl.types.rollouts import (
    GREEDY_REWARD,
    INVALID_TURNS,
    Completion,
    FinishReason,
    GroupHeader,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    Turn,
    episode_indices,
)
from streamrl.types.tokens.checks import BoolArray, Float32Array, Int32Array
from streamrl.types.tokens.sets import TokenSets, TopLogprobs
from streamrl.types.validation import ValidationReport, ValidatorStatus
from streamrl.types.weights import (
    BroadcastEndpoint,
    CudaMemory,
    Endpoint,
    FilesEndpoint,
    HeldEndpoint,
    HostMemory,
    LoadReport,
    Locality,
    SharedEndpoint,
    TensorSpec,
    WeightUpdate,
)

__all__ = [
    "GREEDY_REWARD",
    "INVALID_TURNS",
    "MAX_AWAITED",
    "MAX_FAILED_ROWS",
    "MAX_GROUPS",
    "MAX_NAMES",
    "MAX_RETRIED",
    "MIN_RETRIED_LEASES",
    "Books",
    "BoolArray",
    "BroadcastEndpoint",
    "BufferStats",
    "Completion",
    "Count",
    "CudaMemory",
    "DropReason",
    "Endpoint",
    "FailedReward",
    "FailedRow",
    "FilesEndpoint",
    "FinishReason",
    "Float32Array",
    "GapStatistics",
    "GeneratorStatus",
    "GroupFailure",
    "GroupHeader",
    "HeartbeatReply",
    "HeldEndpoint",
    "HostMemory",
    "IndexRanges",
    "Int32Array",
    "LearnerActivity",
    "LearnerStatus",
    "Lease",
    "LengthHistogram",
    "LoadReport",
    "Loan",
    "Locality",
    "Media",
    "Name",
    "NumGroups",
    "OverduePolicy",
    "PackedGroup",
    "ParityReport",
    "ParitySamples",
    "PolicyVersion",
    "Port",
    "PromptIndex",
    "RefusalReason",
    "ResponseLengths",
    "RetriedPrompt",
    "SamplingParams",
    "SchedulingState",
    "SharedEndpoint",
    "TensorSpec",
    "Text",
    "TokenSets",
    "TopLogprobs",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "ValidationReport",
    "ValidatorStatus",
    "WaitSeconds",
    "WeightUpdate",
    "admission_capacity",
    "distance_p_value",
    "episode_indices",
    "length_distance",
    "pack",
    "ranges_of",
    "replace",
    "rounded_length",
]
