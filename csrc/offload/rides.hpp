// Jobs of riders: attention that outlives the plan which published it.
//
// A plan moves some groups by one stage each. A group that is moved to stage s takes back the job
// that its move to stage s - 1 published (layer s - 1), and publishes one for layer s unless s is
// n_layers. In a plan, by growing stage:
//
//   begin ─▶ for each group: [wait ─▶ collect] ─▶ [publish] ─▶ end
//                              └ time is up ─▶ give_up
//
// Jobs are numbered through; the queue's `published` says that all up to it are. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "layout/control.hpp"
#include "layout/work.hpp"
#include "offload/collector.hpp"
#include "offload/decode_rows.hpp"

namespace neo::offload {

// One group in one plan. `places`: indices in the group, growing, one for each row.
struct Move {
  std::uint32_t group;
  std::uint32_t stage;
  const std::uint32_t* places;
  DecodeRows rows;
};

// What a device needs to know of a move. 0: no such job.
struct AnnouncedMove {
  std::uint64_t collects;                // number of the job it takes back
  std::uint64_t publishes;               // number of the job it publishes
  std::vector<wire::WorkRow> collected;  // of the present riders, in the job taken back
  std::uint32_t n_tasks;                 // of the job it publishes
};

class Rides {
 public:
  // Gives up whatever a predecessor left in flight.
  Rides(std::shared_ptr<layout::Control> control, layout::Work work,
        std::shared_ptr<ipc::Segment> exchange, const wire::Geometry& geometry);

  // Throws std::invalid_argument or std::out_of_range for moves that break the rules of wire.hpp.
  void check(const std::vector<Move>& moves) const;
  // Numbers the jobs and writes their descriptors. `plan`: slot of a plan in flight.
  std::vector<AnnouncedMove> begin(std::uint32_t plan, const std::vector<Move>& moves);
  // Takes away the descriptors of what the plan has taken back.
  void end(std::uint32_t plan);
  // The plan moves groups and has not ended.
  bool busy(std::uint32_t plan) const { return plans_[plan].moves; }

  // Of the plan begun last. q: [riders][n_heads][head_dim] in act_dtype.
  void publish(std::uint32_t group, const std::byte* q);
  // False: not done within the time, or given up.
  bool wait(std::uint32_t group, std::uint64_t timeout_ns);
  bool given_up(std::uint32_t group) const;
  // out: as q.
  void collect(std::uint32_t group, std::byte* out);

  // Gives up every job up to this number.
  void abort_through(std::uint64_t job);
  // Gives up every published job.
  void give_up();
  // Some published job is neither done nor given up.
  bool pending() const;
  // Grows whenever a job is done.
  std::uint64_t progress() const;
  std::size_t n_rows(std::uint32_t group) const { return move(group).places.size(); }
  std::uint32_t n_tasks(std::uint32_t group) const { return move(group).announced.n_tasks; }

 private:
  struct Group {
    std::uint32_t stage = 0;
    std::uint64_t job = 0;            // published or to be published, and not taken back; 0: none
    std::vector<wire::WorkRow> rows;  // of that job, by place; n_splits 0: absent
  };
  struct Plan {
    bool moves = false;
    std::vector<std::uint64_t> collects;  // jobs it takes back
  };
  struct Current {
    std::uint32_t stage = 0;
    std::vector<std::uint32_t> places;
    AnnouncedMove announced{};
  };

  void check_move(const Move& move) const;
  void check_rows(const Move& move) const;
  AnnouncedMove begin_move(Plan& plan, const Move& move);
  std::uint32_t cut(Group& group, const Move& move) const;
  void write_desc(std::uint64_t job, const Move& move, const Group& group, std::uint32_t n_tasks);
  void retire(std::uint64_t job);
  bool over(const wire::RideDesc* desc, std::uint64_t job) const;
  const Current& move(std::uint32_t group) const;

  std::shared_ptr<layout::Control> control_;
  layout::Work work_;
  std::shared_ptr<ipc::Segment> exchange_;
  wire::Geometry geometry_;
  layout::ExchangeLayout layout_;
  Collector collector_;
  std::vector<Group> groups_;
  std::vector<Plan> plans_;       // [n_plans]
  std::vector<Current> current_;  // [ride_groups], of the plan begun last
  std::uint64_t next_job_ = 1;
};

}  // namespace neo::offload
