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
    OverduePolicy,
    RetriedPrompt,
    SchedulingState,
    TakenBatch,
    admission_capacity,
)
from streamrl.types.experts import UNRECORDED, RoutedExperts
from streamrl.types.index_ranges import IndexRanges, ranges_of
from streamrl.types.lengths import (
    LengthHistogram,
    ResponseLengths,
    distance_p_value,
    length_distance,
    rounded_length,
)
from streamrl.types.media import Media
from streamrl.types.packed import GroupFacts, PackedGroup, pack
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
from streamrl.types.reasons import (
    MAX_FAILED_ROWS,
    DropReason,
    FailedReward,
    FailedRow,
    GroupFailure,
    RefusalReason,
)
from streamrl.types.rollouts import (
    GREEDY_REWARD,
    INVALID_TURNS,
    Completion,
    FinishReason,
    GroupHeader,
    SamplingParams,
    SiblingHeader,
    Trajectory,
    TrajectoryGroup,
    Turn,
    episode_indices,
)
from streamrl.types.tokens import BoolArray, Float32Array, Int32Array, TokenSets, TopLogprobs
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
