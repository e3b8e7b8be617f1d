"""What crosses a process: frozen records with numpy arrays, checked where they are made.

Invariant: a record that exists is well formed. `__post_init__` runs on construction and again on
decode, so no reader checks shapes a second time. Nothing here is ever changed in place.
"""

from msgspec.structs import replace as replace

from streamrl.types.buffer import (
    MAX_AWAITED as MAX_AWAITED,
    MAX_RETRIED as MAX_RETRIED,
    MIN_RETRIED_LEASES as MIN_RETRIED_LEASES,
    Books as Books,
    BufferStats as BufferStats,
    GeneratorStatus as GeneratorStatus,
    HeartbeatReply as HeartbeatReply,
    LearnerActivity as LearnerActivity,
    LearnerStatus as LearnerStatus,
    Lease as Lease,
    OverduePolicy as OverduePolicy,
    RetriedPrompt as RetriedPrompt,
    SchedulingState as SchedulingState,
    TakenBatch as TakenBatch,
    admission_capacity as admission_capacity,
)
from streamrl.types.experts import (
    UNRECORDED as UNRECORDED,
    RoutedExperts as RoutedExperts,
)
from streamrl.types.index_ranges import (
    IndexRanges as IndexRanges,
    ranges_of as ranges_of,
)
from streamrl.types.lengths import (
    LengthHistogram as LengthHistogram,
    ResponseLengths as ResponseLengths,
    distance_p_value as distance_p_value,
    length_distance as length_distance,
    rounded_length as rounded_length,
)
from streamrl.types.media import Media as Media
from streamrl.types.packed import (
    GroupFacts as GroupFacts,
    PackedGroup as PackedGroup,
    pack as pack,
)
from streamrl.types.parity import (
    GapStatistics as GapStatistics,
    ParityReport as ParityReport,
    ParitySamples as ParitySamples,
)
from streamrl.types.ranges import (
    MAX_COUNT as MAX_COUNT,
    MAX_GROUPS as MAX_GROUPS,
    MAX_NAMES as MAX_NAMES,
    Count as Count,
    Name as Name,
    NumGroups as NumGroups,
    PolicyVersion as PolicyVersion,
    PromptIndex as PromptIndex,
    Text as Text,
    WaitSeconds as WaitSeconds,
)
from streamrl.types.reasons import (
    MAX_FAILED_ROWS as MAX_FAILED_ROWS,
    DropReason as DropReason,
    FailedReward as FailedReward,
    FailedRow as FailedRow,
    GroupFailure as GroupFailure,
    RefusalReason as RefusalReason,
)
from streamrl.types.rollouts import (
    GREEDY_REWARD as GREEDY_REWARD,
    INVALID_TURNS as INVALID_TURNS,
    Completion as Completion,
    FinishReason as FinishReason,
    GroupHeader as GroupHeader,
    SamplingParams as SamplingParams,
    SiblingHeader as SiblingHeader,
    Trajectory as Trajectory,
    TrajectoryGroup as TrajectoryGroup,
    Turn as Turn,
    episode_indices as episode_indices,
)
from streamrl.types.tokens import (
    BoolArray as BoolArray,
    Float32Array as Float32Array,
    Int32Array as Int32Array,
    TokenSets as TokenSets,
    TopLogprobs as TopLogprobs,
)
from streamrl.types.validation import (
    ValidationReport as ValidationReport,
    ValidatorStatus as ValidatorStatus,
)
from streamrl.types.weights import (
    BroadcastDifference as BroadcastDifference,
    BroadcastEndpoint as BroadcastEndpoint,
    CudaMemory as CudaMemory,
    Endpoint as Endpoint,
    FilesEndpoint as FilesEndpoint,
    HeldEndpoint as HeldEndpoint,
    HostMemory as HostMemory,
    LoadReport as LoadReport,
    Locality as Locality,
    SharedEndpoint as SharedEndpoint,
    TensorSpec as TensorSpec,
    WeightUpdate as WeightUpdate,
)
