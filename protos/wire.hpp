// Every struct that two processes share through memory, declared once.
//
// Python sees these as numpy dtypes made by the extension; nothing here is retyped in Python.
// Fields marked [atomic] are accessed only through ipc/atomics.hpp. All others are plain data whose
// hand-over is ordered by a ring, a doorbell or a task word.
//
// Who writes what:
//   control    server: header, geometry, server row | each worker: its own row | core leases: CAS
//   steps      server produces, gpu_worker consumes (payload lies in the ring slots)
//   results    gpu_worker produces, server consumes
//   sequences  server writes block tables, sampling parameters, biases; everyone else reads
//   work       gpu_worker writes descriptors and `published`; cpu workers CAS task words and `done`
//   exchange   gpu_worker writes Q rows; each cpu worker writes its own output area
//   cpu_cache  gpu_worker writes K and V; cpu workers map it read-only
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace neo::wire {

inline constexpr std::uint64_t kMagic = 0x0031'4d48'534f'454eULL;  // "NEOSHM1\0", little endian
inline constexpr std::uint32_t kVersion = 3;
inline constexpr std::uint32_t kChannels = 2;  // one per sub-batch
inline constexpr std::uint32_t kMaxCores = 1024;
inline constexpr std::uint32_t kMaxBiases = 1408;  // of a slot: 300 of logit_bias, stop tokens

enum class SegmentKind : std::uint32_t {
  control = 1,
  steps = 2,
  results = 3,
  sequences = 4,
  work = 5,
  exchange = 6,
  cpu_cache = 7,
};

enum class DType : std::uint32_t { float32 = 0, float16 = 1, bfloat16 = 2, int8 = 3 };

// First bytes of every segment. The creator fills the rest of the segment, then release-stores
// `version`; who attaches acquire-loads it, so a half-made segment is never used.
struct alignas(64) SegmentHeader {
  std::uint64_t magic;
  std::uint64_t layout_hash;  // see layout_hash() below
  std::uint64_t size;         // bytes of the whole segment
  std::uint32_t kind;         // SegmentKind
  std::uint32_t rank;         // tensor-parallel rank that this segment serves
  std::int32_t owner_pid;
  std::uint32_t version;  // [atomic] stored last
  std::uint8_t reserved[24];
};

// Sizes that every process agrees on. Head counts are per rank.
struct alignas(64) Geometry {
  std::uint32_t n_layers;
  std::uint32_t n_heads;     // query heads
  std::uint32_t n_kv_heads;  // divides n_heads; the group is n_heads / n_kv_heads
  std::uint32_t head_dim;
  std::uint32_t act_dtype;    // DType of Q and of the activations
  std::uint32_t kv_dtype;     // DType of the CPU-cache
  std::uint32_t block_size;   // tokens of a GPU-cache block
  std::uint32_t page_size;    // tokens of a CPU-cache page
  std::uint32_t n_pages;      // pages of the CPU-cache (each holds all layers)
  std::uint32_t max_slots;    // sequences that may hold cache at once
  std::uint32_t max_rows;     // rows of one plan, both sub-batches together
  std::uint32_t max_tokens;   // tokens of one plan, both sub-batches together
  std::uint32_t max_blocks;   // block-table columns of a slot
  std::uint32_t max_pages;    // page-table columns of a slot
  std::uint32_t max_tasks;    // attention tasks of one channel and layer
  std::uint32_t max_swaps;    // swaps of one plan
  std::uint32_t n_plans;      // plans in flight = ring slots = work descriptor slots
  std::uint32_t max_workers;  // rows of the worker table
  std::uint32_t rank;
  std::uint32_t world_size;
  std::uint32_t spin_us;        // how long a waiter spins before it sleeps; 0 when cores are scarce
  std::uint32_t lease_us;       // a claim older than this may be taken over
  std::uint32_t max_logprobs;   // alternatives that are reported beside a token
  std::uint32_t ride_groups;    // n_layers + 1, or 0: no riders
  std::uint32_t ride_capacity;  // places of a group
  std::uint32_t reserved[7];
};

// ---- waiting ------------------------------------------------------------------------------------

// An epoch that only grows, plus what a futex needs. Never reset while a process may wait on it.
struct alignas(64) Doorbell {
  std::uint64_t value;     // [atomic] the epoch
  std::uint32_t futex;     // [atomic] bumped on each wake
  std::uint32_t sleepers;  // [atomic] 1: somebody may be asleep; cleared by who wakes
  std::uint8_t reserved[48];
};

// ---- control ------------------------------------------------------------------------------------

enum class WorkerState : std::uint32_t { empty = 0, starting = 1, ready = 2, draining = 3 };

// Liveness is the kernel's word, not a clock's: each process holds an open-file-description lock on
// one byte of the control segment (server: byte 0, gpu_worker of rank r: 1 + r, cpu worker in row
// i: 64 + i). The lock goes when the process does, however it dies, also across containers.
struct alignas(64) ServerRow {
  std::int32_t pid;
  std::uint32_t stopping;  // [atomic] 1: workers leave
  std::uint32_t active;    // [atomic] plans with CPU-requests in flight; cpu workers spin while > 0
  // [atomic] Those of them whose publishes come from a device, which can wake nobody: while > 0 cpu
  // workers spin without an end.
  std::uint32_t device_plans;
  std::uint8_t reserved[48];
};

struct alignas(64) WorkerRow {
  std::int32_t pid;
  std::uint32_t state;         // [atomic] WorkerState
  std::uint32_t n_threads;     // attention threads, 0 when the row is empty
  std::uint32_t spawned;       // 1: a child of the server, which respawns it
  std::uint64_t heartbeat_ns;  // [atomic] CLOCK_MONOTONIC
  std::uint64_t busy_ns;       // [atomic] thread time inside the kernel, ever
  std::uint64_t tasks;         // [atomic] tasks published, ever
  std::uint64_t kv_bytes;      // [atomic] bytes of K and V read, ever
  std::uint64_t stolen;        // [atomic] claims taken over from others, ever
  std::uint64_t lost;          // [atomic] finished too late: the compare-and-swap failed
  std::uint32_t draining;      // [atomic] 1: the server asks this worker to leave
  std::uint32_t rank;
  std::uint8_t reserved[56];
};

// control segment: SegmentHeader, Geometry, ServerRow, WorkerRow[max_workers],
//                  std::uint32_t core_lease[kMaxCores]  ([atomic] worker row + 1, 0 = free)

// ---- rings --------------------------------------------------------------------------------------

// Single producer, single consumer. Indices grow for ever; slot = index % n_slots.
struct alignas(64) RingHeader {
  std::uint64_t tail;  // [atomic] slots published; the producer's
  std::uint64_t cached_head;
  std::uint8_t pad0[48];
  std::uint64_t head;  // [atomic] slots released; the consumer's
  std::uint64_t cached_tail;
  std::uint8_t pad1[48];
  std::uint32_t n_slots;
  std::uint32_t producer_pid;  // [atomic] 0 = role free
  std::uint32_t consumer_pid;  // [atomic]
  std::uint32_t reserved0;
  std::uint64_t slot_bytes;
  std::uint8_t pad2[40];
  Doorbell bell;  // rung on publish; value = tail
};

// ---- steps: server -> gpu_worker ----------------------------------------------------------------

enum class RowKind : std::uint32_t {
  prefill_gpu = 0,  // K and V stay in the GPU-cache
  prefill_cpu = 1,  // K and V go to the CPU-cache layer by layer; no GPU blocks
  decode_gpu = 2,
  decode_cpu = 3,  // attention by the cpu workers
  ride_cpu = 5,    // a decode that passes one linear stage in this plan (odd: CPU, as above)
};

// A ring slot: StepHeader, StepRow[max_rows], Swap[max_swaps], std::int32_t tokens[max_tokens].
// A decode's token may be -1: the one that its slot's latest row before with `sample` gives. If
// that row is void, or was not there, so is this one. Rows are ordered by sub-batch, then
// prefill_gpu, prefill_cpu, decode_gpu, decode_cpu; then riders, by place.
//
// Riders (attention piggybacking, arXiv 2603.12831). A rider is a decode on its way through the
// model: in each plan that names it, it passes one stage s of 0 to n_layers, which is the
// post-projection of layer s - 1 and the pre-projection of layer s. Stage 0 begins with the
// embedding of its token (which may be -1, as above; at other stages the token is not looked at),
// stage n_layers ends with its logits: `sample` is 1 there and 0 elsewhere. Riders of one stage
// form a group: ride_groups persistent groups of ride_capacity places, place = group *
// ride_capacity + index. Between two stages the cpu workers do the group's attention; plans that
// do not name the group may come between. All riders of a group have one stage, no two groups have
// the same, and a group's stage is one more than in the last plan that named it, or 0. A rider at a
// stage > 0 was in that plan in the same place with the same start. Riders may vanish from a group
// at any time; its places are filled at stage 0 only.
struct alignas(64) StepHeader {
  std::uint64_t plan_id;    // grows by one
  std::uint32_t n_rows[3];  // per sub-batch, and riders
  std::uint32_t n_tokens;   // of all rows
  std::uint32_t n_swaps;
  std::uint32_t flags;
  std::uint32_t rank;
  std::uint8_t reserved[28];
};

struct StepRow {
  std::uint32_t slot;
  std::uint32_t kind;      // RowKind
  std::uint32_t start;     // tokens of this sequence already in its cache = position of the first
  std::uint32_t n_new;     // tokens of this row in this plan (1 for a decode)
  std::uint32_t token_at;  // index of the row's first token in tokens[]
  std::uint32_t sample;    // 1: the last token's logits give the next token
  std::uint32_t stage;     // of a rider; 0 for others
  std::uint32_t place;     // of a rider: group * ride_capacity + index; 0 for others
};

enum class SwapKind : std::uint32_t { out = 0, in = 1 };

// Moves tokens [0, n_tokens) of all layers between the slot's blocks and its pages. At each layer
// the executor does swaps first (out before in), then stores, then attention.
struct Swap {
  std::uint32_t slot;
  std::uint32_t kind;  // SwapKind
  std::uint32_t n_tokens;
  std::uint32_t reserved;
};

// ---- results: gpu_worker -> server --------------------------------------------------------------

enum class RowStatus : std::uint32_t {
  computed = 0,  // no token asked for
  sampled = 1,
  // Its CPU attention was abandoned; plan it again at the same position (a rider at stage 0: it
  // stays void, at whatever stages plans in flight have it, until then).
  voided = 2,
};

// A ring slot: ResultHeader, ResultRow[max_rows] (the rows of the step, in its order),
// LogprobEntry[max_rows + max_tokens], TokenLogprob[max_rows + max_tokens][max_logprobs].
struct alignas(64) ResultHeader {
  std::uint64_t plan_id;
  std::uint32_t n_rows;
  std::uint32_t rank;
  // Seconds of the plan by stage, sums over layers.
  float elapsed;
  float linear[2];    // per sub-batch: pre- and post-projection
  float gpu_attn[2];  // prefill and decode attention on the device
  float cpu_wait[2];  // time spent waiting for the cpu workers
  float handoff;      // storing K and V, publishing, collecting
  float swap;
  float head;  // embedding, logits, sampling
  std::uint32_t cpu_tasks;
  std::uint32_t n_logprobs;  // entries
  float ride_wait;           // time spent waiting for the attention of riders
  std::uint8_t reserved[60];
};

struct ResultRow {
  std::uint32_t slot;
  std::uint32_t status;  // RowStatus
  std::int32_t token;    // -1 unless sampled
  float logprob;
};

// Of one token that was sampled, or of one of the prompt's, where the slot asks for it: log-softmax
// of the model's own logits. Entries of a void row count for nothing.
struct LogprobEntry {
  std::uint32_t row;
  std::uint32_t position;  // of the token in its sequence
  std::int32_t token;
  float logprob;
  std::uint32_t rank;   // 1: the likeliest
  std::uint32_t n_top;  // of the entry's TokenLogprobs, the likeliest first
};

struct TokenLogprob {
  std::int32_t token;
  float logprob;
};

// ---- sequences: server -> everyone --------------------------------------------------------------

// sequences segment: SegmentHeader, SlotParams[max_slots],
//                    std::uint32_t block_table[max_slots][max_blocks],
//                    std::uint32_t page_table[max_slots][max_pages],
//                    TokenBias bias[max_slots][kMaxBiases].
// A table row only gets entries appended while a plan that names its slot is in flight; entries and
// slots are reused only after the last plan that names them has reported. A cpu worker may still
// read pages for a rider that no plan names any more: that harms nobody, since it writes only its
// own output area, nobody collects what it makes, and it checks what a table says before it reads.
enum class Feature : std::uint32_t {  // bits: what a slot wants beyond drawing a token
  biases = 1,
  penalties = 2,
  logprobs = 4,
  prompt_logprobs = 8,
};

// Penalties and biases are vLLM's: https://docs.vllm.ai, SamplingParams.
struct alignas(64) SlotParams {
  std::uint64_t seed;
  float temperature;       // 0: greedy
  float top_p;             // 1: off
  float min_p;             // 0: off
  std::int32_t top_k;      // 0: off
  std::uint32_t features;  // Feature bits; 0: nothing below is read
  std::uint32_t n_prompt;  // tokens of the prompt: those behind are the output
  float presence_penalty;
  float frequency_penalty;
  float repetition_penalty;
  std::uint32_t n_logprobs;         // alternatives beside each sampled token
  std::uint32_t n_prompt_logprobs;  // and beside each of the prompt
  // The slot's first n_stop biases are its stop tokens: they hold while it has fewer than `min_len`
  // tokens. n_biases more hold always.
  std::uint32_t n_stop;
  std::uint32_t min_len;
  std::uint32_t n_biases;
};

struct TokenBias {
  std::int32_t token;
  float bias;  // added to its logit
};

// ---- work: gpu_worker -> cpu workers ------------------------------------------------------------

// One job = one channel (sub-batch) at one layer = one epoch of that channel. `published` counts
// only up; job e of a plan is layer e - first_epoch[channel]. No epoch is given to two plans.
struct alignas(64) Channel {
  Doorbell published;   // by the gpu_worker
  Doorbell done;        // max-stored by whichever cpu worker finds every word of the job finished
  std::uint64_t abort;  // [atomic] epochs <= abort are given up: by the watchdog
  std::uint8_t reserved[56];
};

// Jobs of riders are numbered through, over all groups: one job = one group at one stage below
// n_layers, in the order of publishing, which is the order in which they are needed. `published`
// says that all jobs up to it are. Not done and <= abort: given up.
struct alignas(64) RideQueue {
  std::uint64_t published;  // [atomic] by the gpu_worker
  std::uint8_t pad[56];
  std::uint64_t abort;  // [atomic] by the watchdog
  std::uint8_t reserved[56];
};

// Job `job` lies in descriptor job % n_ride_descs. Gone from there: it is over for cpu workers.
struct alignas(64) RideDesc {
  std::uint64_t job;  // [atomic] 0: unused. Stored last, after rows and counts.
  std::uint32_t group;
  std::uint32_t layer;
  std::uint32_t n_rows;
  std::uint32_t n_tasks;
  std::uint8_t reserved[40];
};

struct alignas(64) WorkDesc {
  std::uint64_t plan_id;
  std::uint64_t first_epoch[2];  // [atomic] 0: unused. Stored last, after rows and counts.
  std::uint32_t n_rows[2];
  std::uint32_t n_tasks[2];
  std::uint32_t n_layers;
  std::uint8_t reserved[20];
};

// Row i of a channel attends with Q row i over tokens [0, seq_len) of its slot's pages. Its tasks
// are first_task + kv_head * n_splits + split; a split covers whole pages.
struct WorkRow {
  std::uint32_t slot;
  std::uint32_t seq_len;  // with the token being decoded
  std::uint32_t first_task;
  std::uint32_t n_splits;
};

enum class TaskState : std::uint32_t { free = 0, claimed = 1, finished = 2 };

// A task word, one per task of a channel: [atomic] 64 bits
//   bits 63..20 epoch | 19..18 TaskState | 17..9 worker row | 8..0 thread
// A rider job's epoch is its number.
// Claim: CAS {older epoch, any} or {e, claimed by other, lease over} -> {e, claimed, me}.
// Finish: CAS {e, claimed, anyone} -> {e, finished, me}: the first whole result wins, its maker's
// own area holds it; who finds the task finished (or the epoch gone) has lost, harmlessly.
inline constexpr unsigned kTaskEpochShift = 20;
inline constexpr unsigned kTaskStateShift = 18;
inline constexpr unsigned kTaskWorkerShift = 9;
inline constexpr std::uint32_t kTaskFieldMask = 0x1ff;
inline constexpr std::uint32_t kRideSplits = 2;  // of each place of a group, on average

// work segment: SegmentHeader, Doorbell work (rung on every publish; cpu workers sleep on it),
//               Channel[kChannels], WorkDesc[n_plans],
//               WorkRow[n_plans][kChannels][max_rows], std::uint64_t task[kChannels][max_tasks],
//               RideQueue, Doorbell done[ride_groups] (value: number of the group's last job done),
//               RideDesc[n_ride_descs = (n_plans + 1) * ride_groups],
//               WorkRow[n_ride_descs][ride_capacity], std::uint64_t task[ride_groups][ride_tasks],
//               ride_tasks = ride_capacity * n_kv_heads * kRideSplits.
// exchange segment: SegmentHeader, Q [kChannels][max_rows][n_heads][head_dim] in act_dtype, then
//               for riders Q [ride_groups][ride_capacity][n_heads][head_dim],
//               then per worker row, channel and task, and then group and task of riders:
//               float O[group][head_dim] (not normalised), m[group] (running maximum), l[group]
//               (sum of exp).
// cpu_cache segment: SegmentHeader padded to 4096, then
//               [layer][page][kv_head]{K [page_size][head_dim], V [page_size][head_dim]} in
//               kv_dtype.
//               int8: K and V are each followed by float scale[page_size], one per
//               row, and row = scale * integers (layout::quantize).

// ---- layout hash --------------------------------------------------------------------------------

constexpr std::uint64_t fold(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x100000001b3ULL;
}

// Changes with any size below and with the version; attach refuses a segment of another value.
constexpr std::uint64_t layout_hash() {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (std::uint64_t size : {std::uint64_t{kVersion},
                             std::uint64_t{sizeof(SegmentHeader)},
                             std::uint64_t{sizeof(Geometry)},
                             std::uint64_t{sizeof(Doorbell)},
                             std::uint64_t{sizeof(ServerRow)},
                             std::uint64_t{sizeof(WorkerRow)},
                             std::uint64_t{sizeof(RingHeader)},
                             std::uint64_t{sizeof(StepHeader)},
                             std::uint64_t{sizeof(StepRow)},
                             std::uint64_t{sizeof(Swap)},
                             std::uint64_t{sizeof(ResultHeader)},
                             std::uint64_t{sizeof(ResultRow)},
                             std::uint64_t{sizeof(LogprobEntry)},
                             std::uint64_t{sizeof(TokenLogprob)},
                             std::uint64_t{sizeof(SlotParams)},
                             std::uint64_t{sizeof(TokenBias)},
                             std::uint64_t{kMaxBiases},
                             std::uint64_t{sizeof(Channel)},
                             std::uint64_t{sizeof(WorkDesc)},
                             std::uint64_t{sizeof(WorkRow)},
                             std::uint64_t{sizeof(RideQueue)},
                             std::uint64_t{sizeof(RideDesc)},
                             std::uint64_t{offsetof(Geometry, ride_capacity)},
                             std::uint64_t{offsetof(StepHeader, n_tokens)},
                             std::uint64_t{offsetof(RideQueue, abort)},
                             std::uint64_t{offsetof(WorkerRow, draining)},
                             std::uint64_t{offsetof(RingHeader, bell)},
                             std::uint64_t{offsetof(ResultHeader, cpu_tasks)},
                             std::uint64_t{offsetof(Channel, abort)},
                             std::uint64_t{kTaskEpochShift}})
    hash = fold(hash, size);
  return hash;
}

template <typename T, std::size_t Size>
constexpr bool shared_struct() {
  static_assert(std::is_trivially_copyable_v<T> && std::is_standard_layout_v<T>);
  static_assert(sizeof(T) == Size);
  return true;
}
static_assert(shared_struct<SegmentHeader, 64>());
static_assert(shared_struct<Geometry, 128>());
static_assert(shared_struct<Doorbell, 64>());
static_assert(shared_struct<ServerRow, 64>());
static_assert(shared_struct<WorkerRow, 128>());
static_assert(shared_struct<RingHeader, 256>());
static_assert(shared_struct<StepHeader, 64>());
static_assert(shared_struct<StepRow, 32>());
static_assert(shared_struct<Swap, 16>());
static_assert(shared_struct<ResultHeader, 128>());
static_assert(shared_struct<ResultRow, 16>());
static_assert(shared_struct<LogprobEntry, 24>());
static_assert(shared_struct<TokenLogprob, 8>());
static_assert(shared_struct<SlotParams, 64>());
static_assert(shared_struct<TokenBias, 8>());
static_assert(shared_struct<Channel, 192>());
static_assert(shared_struct<WorkDesc, 64>());
static_assert(shared_struct<WorkRow, 16>());
static_assert(shared_struct<RideQueue, 128>());
static_assert(shared_struct<RideDesc, 64>());
static_assert(offsetof(RingHeader, head) == 64 && offsetof(RingHeader, bell) == 192);
static_assert(offsetof(Channel, done) == 64 && offsetof(Channel, abort) == 128);

}  // namespace neo::wire
