#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "attn_worker/attention_worker.hpp"
#include "bindings/arrays.hpp"
#include "layout/control.hpp"
#include "offload/exchange.hpp"

namespace neo::bindings {
namespace {

using attn_worker::AttentionWorker;
using layout::Control;
using offload::Exchange;
using ControlPtr = std::shared_ptr<Control>;
using ArrayPair = std::pair<py::array, py::array>;

offload::DecodeRows decode_rows(const py::array& slots, const py::array& seq_lens) {
  const py::ssize_t n = slots.ndim() == 1 ? slots.shape(0) : -1;
  return {index_data(slots, "slots", n), index_data(seq_lens, "seq_lens", n),
          static_cast<std::size_t>(n)};
}

// (group, stage, places, slots, seq_lens), the arrays uint32 [riders].
using MoveTuple = std::tuple<std::uint32_t, std::uint32_t, py::array, py::array, py::array>;

std::vector<offload::Move> to_moves(const std::vector<MoveTuple>& tuples) {
  std::vector<offload::Move> moves;
  for (const auto& [group, stage, places, slots, seq_lens] : tuples) {
    const offload::DecodeRows rows = decode_rows(slots, seq_lens);
    const auto n = static_cast<py::ssize_t>(rows.n);
    moves.push_back({group, stage, index_data(places, "places", n), rows});
  }
  return moves;
}

void begin_plan(Exchange& exchange, std::uint64_t plan_id, const ArrayPair& slots,
                const ArrayPair& seq_lens, const std::vector<MoveTuple>& tuples) {
  const std::vector<offload::Move> moves = to_moves(tuples);
  const std::array<offload::DecodeRows, wire::kChannels> rows{
      decode_rows(slots.first, seq_lens.first), decode_rows(slots.second, seq_lens.second)};
  py::gil_scoped_release release;
  exchange.begin_plan(plan_id, rows, moves);
}

py::array_t<std::uint32_t> tasks_of(const std::vector<wire::WorkRow>& rows) {
  py::array_t<std::uint32_t> tasks({static_cast<py::ssize_t>(rows.size()), py::ssize_t{2}});
  auto cell = tasks.mutable_unchecked<2>();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto at = static_cast<py::ssize_t>(i);
    cell(at, 0) = rows[i].first_task;
    cell(at, 1) = rows[i].n_splits;
  }
  return tasks;
}

py::tuple announce(Exchange& exchange, std::uint64_t plan_id, const ArrayPair& slots,
                   const ArrayPair& seq_lens, const std::vector<MoveTuple>& tuples) {
  const std::array<offload::DecodeRows, wire::kChannels> rows{
      decode_rows(slots.first, seq_lens.first), decode_rows(slots.second, seq_lens.second)};
  const offload::Announced plan = exchange.announce(plan_id, rows, to_moves(tuples));
  py::tuple channels(wire::kChannels);
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    channels[c] = py::make_tuple(plan.first_epoch[c], plan.n_tasks[c], tasks_of(plan.rows[c]));
  }
  return channels;
}

py::list announced_moves(const Exchange& exchange) {
  py::list moves;
  for (const offload::AnnouncedMove& move : exchange.moves()) {
    moves.append(
        py::make_tuple(move.collects, move.publishes, move.n_tasks, tasks_of(move.collected)));
  }
  return moves;
}

std::byte* ride_data(Exchange& exchange, std::uint32_t group, const py::array& array,
                     const char* name, bool writable) {
  const wire::Geometry& g = exchange.geometry();
  return act_data(array, name,
                  {static_cast<py::ssize_t>(exchange.rides().n_rows(group)), g.n_heads, g.head_dim},
                  g.act_dtype, writable);
}

void bind_rides(py::class_<Exchange>& exchange) {
  exchange
      .def(
          "ride_publish",
          [](Exchange& self, std::uint32_t group, const py::array& q) {
            const std::byte* data = ride_data(self, group, q, "q", false);
            py::gil_scoped_release release;
            self.rides().publish(group, data);
          },
          py::arg("group"), py::arg("q"))
      .def(
          "ride_wait",
          [](Exchange& self, std::uint32_t group, double timeout_s) {
            return wait_interruptibly(
                to_ns(timeout_s, "timeout_s"),
                [&](std::uint64_t ns) { return self.rides().wait(group, ns); },
                [&] { return self.rides().given_up(group); });
          },
          py::arg("group"), py::arg("timeout_s"))
      .def(
          "ride_collect",
          [](Exchange& self, std::uint32_t group, const py::array& out) {
            std::byte* data = ride_data(self, group, out, "out", true);
            py::gil_scoped_release release;
            self.rides().collect(group, data);
          },
          py::arg("group"), py::arg("out"))
      .def("ride_give_up", [](Exchange& self) { self.rides().give_up(); })
      .def(
          "ride_given_up",
          [](Exchange& self, std::uint32_t group) { return self.rides().given_up(group); },
          py::arg("group"))
      .def(
          "ride_abort_through",
          [](Exchange& self, std::uint64_t job) { self.rides().abort_through(job); },
          py::arg("job"))
      .def("ride_progress", [](Exchange& self) { return self.rides().progress(); })
      .def(
          "ride_tasks",
          [](Exchange& self, std::uint32_t group) { return self.rides().n_tasks(group); },
          py::arg("group"))
      .def("announced_moves", &announced_moves);
}

std::byte* channel_data(const Exchange& exchange, std::uint32_t channel, const py::array& array,
                        const char* name, bool writable) {
  const wire::Geometry& g = exchange.geometry();
  return act_data(array, name,
                  {static_cast<py::ssize_t>(exchange.n_rows(channel)), g.n_heads, g.head_dim},
                  g.act_dtype, writable);
}

void bind_exchange(py::module_& module) {
  py::class_<Exchange> exchange(module, "Exchange");
  bind_rides(exchange);
  exchange
      .def(py::init([](ControlPtr control, SegmentPtr work, SegmentPtr exchange,
                       const py::array& geometry) {
             return std::make_unique<Exchange>(std::move(control), std::move(work),
                                               std::move(exchange), to_geometry(geometry));
           }),
           py::arg("control"), py::arg("work"), py::arg("exchange"), py::arg("geometry"))
      .def("begin_plan", &begin_plan, py::arg("plan_id"), py::arg("slots"), py::arg("seq_lens"),
           py::arg("moves") = std::vector<MoveTuple>{})
      .def(
          "publish",
          [](Exchange& self, std::uint32_t channel, std::uint32_t layer, const py::array& q) {
            const std::byte* data = channel_data(self, channel, q, "q", false);
            py::gil_scoped_release release;
            self.publish(channel, layer, data);
          },
          py::arg("channel"), py::arg("layer"), py::arg("q"))
      // In slices: a worker that dies between storing `done` and ringing costs one slice.
      .def(
          "wait",
          [](Exchange& self, std::uint32_t channel, double timeout_s) {
            return wait_interruptibly(
                to_ns(timeout_s, "timeout_s"),
                [&](std::uint64_t ns) { return self.wait(channel, ns); },
                [&] { return self.aborted(channel); });
          },
          py::arg("channel"), py::arg("timeout_s"))
      .def("abort", &Exchange::abort, py::arg("channel"))
      .def(
          "collect",
          [](Exchange& self, std::uint32_t channel, const py::array& out) {
            std::byte* data = channel_data(self, channel, out, "out", true);
            py::gil_scoped_release release;
            self.collect(channel, data);
          },
          py::arg("channel"), py::arg("out"))
      .def("end_plan", &Exchange::end_plan)
      .def("announce", &announce, py::arg("plan_id"), py::arg("slots"), py::arg("seq_lens"),
           py::arg("moves") = std::vector<MoveTuple>{})
      .def("abort_through", &Exchange::abort_through, py::arg("channel"), py::arg("epoch"))
      .def("done_epoch", &Exchange::done_epoch, py::arg("channel"))
      .def("retire", &Exchange::retire, py::arg("plan_id"))
      .def("n_tasks", &Exchange::n_tasks, py::arg("channel"))
      .def("live_workers", &Exchange::live_workers);
}

std::unique_ptr<AttentionWorker> make_worker(ControlPtr control, SegmentPtr work,
                                             SegmentPtr exchange, SegmentPtr cpu_cache,
                                             SegmentPtr sequences, std::uint32_t row,
                                             std::uint32_t n_threads, std::vector<int> cores,
                                             std::string fault) {
  const attn_worker::WorkerSegments segments{std::move(control), std::move(work),
                                             std::move(exchange), std::move(cpu_cache),
                                             std::move(sequences)};
  const attn_worker::WorkerOptions options{row, n_threads, std::move(cores), std::move(fault)};
  py::gil_scoped_release release;
  return std::make_unique<AttentionWorker>(segments, options);
}

}  // namespace

void bind_offload(py::module_& module) {
  bind_exchange(module);
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<AttentionWorker>(module, "AttentionWorker")
      .def(py::init(&make_worker), py::arg("control"), py::arg("work"), py::arg("exchange"),
           py::arg("cpu_cache"), py::arg("sequences"), py::arg("row"), py::arg("n_threads"),
           py::arg("cores") = std::vector<int>{}, py::arg("fault") = "")
      .def(
          "record",
          [](AttentionWorker& self, const py::buffer& timeline) {
            const py::buffer_info memory = timeline.request(true);
            self.record(static_cast<std::byte*>(memory.ptr),
                        static_cast<std::uint64_t>(memory.size * memory.itemsize));
          },
          py::arg("timeline"), py::keep_alive<1, 2>())
      .def("start", &AttentionWorker::start, Unlocked())
      .def("stop", &AttentionWorker::stop, Unlocked())
      .def("heartbeat", &AttentionWorker::heartbeat);
}

}  // namespace neo::bindings
