// The tape of a Python object, as the files share it that bind its operations.
#pragma once

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "module.h"

namespace trivium {

inline constexpr const char* kActivations[] = {"silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "sigmoid", "tanh", "softplus"};

template <class Enum, size_t N>
inline Enum named(const char* const (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("unknown name: " + name);
}

template <typename T>
using Array = nanobind::ndarray<const T, nanobind::c_contig, nanobind::device::cpu>;

// A tape and the arrays of its current step.
struct BoundTape {
  BoundTape(std::shared_ptr<Runtime> owner, std::shared_ptr<KvPool> kv)
      : runtime(std::move(owner)), pool(std::move(kv)), tape(runtime->pool, runtime->kernels, runtime->linear, pool) {}

  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<KvPool> pool;
  Tape tape;
  std::vector<nanobind::object> held;
  nanobind::object sampling;
  std::array<int64_t, kInputs> table_rows{};  // of the shortest table that each input looks up; 0: none
  int64_t slots = 0;  // of adapters; 0: no operation reads them
  std::vector<int64_t> recurrent;  // groups whose sequences each need a page

  template <typename T>
  const T* take(const nanobind::object& from, const char* name) {
    nanobind::object value = from.attr(name);
    auto array = nanobind::cast<Array<T>>(value);
    held.push_back(nanobind::cast(array));
    return array.data();
  }
  void needs_page(int64_t group) {
    if (std::find(recurrent.begin(), recurrent.end(), group) == recurrent.end()) recurrent.push_back(group);
  }
  template <typename O>
  void add(std::unique_ptr<O> op, const std::string& name, bool barrier) {
    auto kept = std::make_shared<std::string>(name);
    tape.keep(kept);
    tape.add(std::move(op), kept->c_str(), barrier);
  }
};

// module_models.cpp: operations of experts, recurrences and compressed attention.
void bind_model_ops(nanobind::class_<BoundTape>& tape);

}  // namespace trivium
