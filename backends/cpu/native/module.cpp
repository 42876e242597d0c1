// trivium_cpu._native: what the Python half of the backend sees of the native one.
#include "module.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <ctime>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "amx_tiles.h"
#include "cpu_features.h"
#include "peak.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivium {
namespace {

template <class Enum, size_t N>
Enum named(const char* const (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("unknown name: " + name);
}

constexpr const char* kKvTypes[] = {"float32", "bfloat16", "float16", "int8"};

void finish_packing(Runtime& runtime) {
  const std::vector<ByteRows> read = std::exchange(runtime.sources, {});  // let go of afterwards, come what may
  nb::gil_scoped_release release;
  runtime.packer.finish();
}

// What can't fail is packed in the background, all else at once; see Packer.
linear::PackedMatrix pack(Runtime& runtime, const std::string& format, const std::string& storage, int64_t in, const ByteRows& rows, bool mapped) {
  const auto stored = named<linear::Storage>(linear::kStorageNames, storage);
  const auto wanted = named<linear::Format>(linear::kFormatNames, format);
  const linear::Source source{stored, rows.data(), static_cast<int64_t>(rows.shape(1))};
  const bool whole = linear::storage_row_bytes(stored, in) == source.row_bytes;
  linear::PackedMatrix matrix(runtime.arena, linear::choose_layout(wanted, stored), static_cast<int64_t>(rows.shape(0)), in);
  runtime.packer.add(matrix, source, mapped);
  runtime.sources.push_back(rows);
  if (!mapped || !whole || !linear::is_lossless(wanted, stored) || stored == linear::Storage::mxfp4) finish_packing(runtime);
  return matrix;
}

FloatArray unpack(Runtime& runtime, const linear::PackedMatrix& matrix) {
  const linear::MatrixView& view = matrix.view();
  FloatArray out = new_array<float>({static_cast<size_t>(view.out), static_cast<size_t>(view.in)});
  finish_packing(runtime);
  Shares shares(runtime.pool->threads());
  runtime.pool->run([&](Worker& worker) {
    worker.share(shares, view.out, [&](int64_t row) { linear::unpack_row(view, row, out.data() + row * view.in); });
  });
  return out;
}

std::shared_ptr<Runtime> make_runtime(int threads, const std::string& tier) {
  std::vector<std::string> tiers = available_tiers();
  for (std::string& emulated : emulated_tiers()) tiers.push_back(std::move(emulated));
  if (std::find(tiers.begin(), tiers.end(), tier) == tiers.end()) throw std::invalid_argument("this machine lacks " + tier);
#if TRIVIUM_X86
  if (tier == "amx" && !amx::check_tiles()) {
    throw std::runtime_error("this processor's AMX tiles give other products than its manual says; choose another instruction set, such as isa=avx512");
  }
#endif
  auto isa = linear::Isa::portable;
  if (tier == "avx2") isa = linear::Isa::avx2;
  if (tier == "amx_emulated") isa = linear::Isa::amx_emulated;
  if (tier == "neon") isa = linear::Isa::neon;
  if (tier == "amx") isa = linear::Isa::amx;
  if (tier.starts_with("avx512")) isa = cpu_features().avx512_vnni ? linear::Isa::avx512_vnni : linear::Isa::avx512;
  return std::make_shared<Runtime>(std::make_shared<ThreadPool>(threads), *find_kernels(tier), linear::kernels(isa));
}

void check_pages(const KvPool& pool, const std::vector<int64_t>& ids) {
  for (const int64_t id : ids) {
    if (id < 0 || id >= pool.pages()) throw std::out_of_range("page " + std::to_string(id) + " of " + std::to_string(pool.pages()));
  }
}

// (k, v), each float32[pages, page_size, kv_heads, head_dim].
nb::tuple export_kv(const KvPool& pool, const Runtime& runtime, const KvLayer& layer, const std::vector<int64_t>& ids) {
  check_pages(pool, ids);
  const KvLayout& l = layer.layout;
  const auto dims = {ids.size(), static_cast<size_t>(l.page_size), static_cast<size_t>(l.kv_heads), static_cast<size_t>(l.head_dim)};
  FloatArray k = new_array<float>(dims), v = new_array<float>(dims);
  int64_t at = 0;
  for (const int64_t id : ids) {
    const uint8_t* page = pool.page(id) + layer.offset;
    for (int64_t token = 0; token < l.page_size; ++token) {
      for (int64_t head = 0; head < l.kv_heads; ++head, at += l.head_dim) {
        runtime.kernels.read_kv(l, token, page + l.key_offset(head), page + l.value_offset(head), k.data() + at, v.data() + at);
      }
    }
  }
  return nb::make_tuple(k, v);
}

using PageArray = nb::ndarray<const float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

void import_kv(KvPool& pool, const Runtime& runtime, const KvLayer& layer, const std::vector<int64_t>& ids, const PageArray& k, const PageArray& v) {
  check_pages(pool, ids);
  const KvLayout& l = layer.layout;
  for (const PageArray* a : {&k, &v}) {
    if (a->shape(0) != ids.size() || static_cast<int64_t>(a->shape(1)) != l.page_size || static_cast<int64_t>(a->shape(2)) != l.kv_heads ||
        static_cast<int64_t>(a->shape(3)) != l.head_dim) {
      throw std::invalid_argument("pages don't have this layer's shape");
    }
  }
  int64_t at = 0;
  for (const int64_t id : ids) {
    uint8_t* page = pool.page(id) + layer.offset;
    for (int64_t token = 0; token < l.page_size; ++token) {
      for (int64_t head = 0; head < l.kv_heads; ++head, at += l.head_dim) {
        runtime.kernels.write_kv(l, token, 1, k.data() + at, 0, v.data() + at, 0, page + l.key_offset(head), page + l.value_offset(head));
      }
    }
  }
}

void copy_pages(KvPool& pool, const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  check_pages(pool, from);
  check_pages(pool, to);
  for (size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
    std::memcpy(pool.page(to[i]), pool.page(from[i]), static_cast<size_t>(pool.page_bytes()));
  }
}

// Processor time of the calling thread: without what other programs took meanwhile.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double multiply_add_rate(const Runtime& runtime, int64_t rounds) {
  std::vector<double> rates(static_cast<size_t>(runtime.pool->threads()));
  runtime.pool->run([&](Worker& worker) {
    const double start = thread_seconds();
    const auto done = static_cast<double>(multiply_adds(runtime.kernels.name, rounds));
    rates[static_cast<size_t>(worker.index())] = done / (thread_seconds() - start);
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

void bind_kv(nb::module_& m) {
  nb::class_<KvLayer>(m, "KvLayer")
      .def("__init__", [](KvLayer* self, int64_t group, int64_t offset, const std::string& type, int64_t page_size, int64_t kv_heads, int64_t head_dim,
                          int64_t latent) {
        new (self) KvLayer{group, offset, {named<KvType>(kKvTypes, type), page_size, kv_heads, head_dim, latent}};
      }, "group"_a, "offset"_a, "type"_a, "page_size"_a, "kv_heads"_a, "head_dim"_a, "latent"_a = 0,
           "latent > 0: LatentKV of one kv head, whose values are its keys' first `latent` numbers.")
      .def_prop_ro("nbytes", [](const KvLayer& layer) { return layer.layout.bytes(); }, "Bytes of one page's part of this layer.")
      .def_prop_ro("value_dim", [](const KvLayer& layer) { return layer.layout.value_dim(); }, "Numbers of a stored value, padding included.");
  nb::class_<KvPool>(m, "KvPool")
      .def(nb::init<int64_t, int64_t, int64_t>(), "pages"_a, "page_bytes"_a, "page_size"_a)
      .def("export_kv", &export_kv, "runtime"_a, "layer"_a, "ids"_a)
      .def("import_kv", &import_kv, "runtime"_a, "layer"_a, "ids"_a, "k"_a, "v"_a)
      .def("copy", &copy_pages, "src"_a, "dst"_a)
      .def("view", [](KvPool& pool) {
        return nb::ndarray<nb::numpy, uint8_t>(pool.page(0), {static_cast<size_t>(pool.pages()), static_cast<size_t>(pool.page_bytes())}, nb::find(pool));
      }, "uint8[pages, page_bytes], the pool itself.");
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("cpu_name", &cpu_name);
  m.def("tiers", &available_tiers, "Instruction sets this machine can run, best first.");
  m.def("emulated_tiers", &emulated_tiers, "Tiers whose kernels run here on an emulation of their instructions: for tests.");
  m.def("missing", &missing, "tier"_a, "Why a tier is not among them; empty if it is.");
  m.def("features", [] {
    const CpuFeatures& f = cpu_features();
    nb::dict d;
    d["avx2"] = f.avx2;
    d["avx512"] = f.avx512;
    d["avx512_vnni"] = f.avx512_vnni;
    d["avx512_bf16"] = f.avx512_bf16;
    d["fast_bf16_dot"] = f.fast_bf16_dot;
    d["avx_vnni"] = f.avx_vnni;
    d["amx"] = f.amx;
    d["neon_dot"] = f.neon_dot;
    return d;
  });
  nb::module_ linear_module = m.def_submodule("linear");
  linear::bind_linear(linear_module);
  linear_module.def("needs_quantised", [](const linear::PackedMatrix& matrix) { return linear::needs_quantised(matrix.view().layout); });
  linear_module.def("reads_parts", [](const linear::PackedMatrix& matrix) { return linear::records_of(matrix.view().layout) == linear::Records::parts; },
                    "Whether its inputs are quantised by parts, and in no other way.");
  linear_module.def("record_numbers", [](const std::vector<const linear::PackedMatrix*>& matrices) {
    auto records = linear::Records::none;
    for (const auto* matrix : matrices) records = records | linear::records_of(matrix->view().layout);
    return linear::QuantisedRows::row_bytes(matrices.at(0)->view().in, records) / static_cast<int64_t>(sizeof(float));
  }, "Numbers of 4 bytes that a row of inputs takes, quantised as matrices need that read it.");
  m.attr("SPAN") = kSpan;
  nb::class_<Runtime>(m, "Runtime")
      .def(nb::new_(&make_runtime), "threads"_a, "tier"_a)
      .def_prop_ro("linear", [](const Runtime& runtime) { return runtime.linear.name; }, "The instruction set of its linear kernels.")
      .def_prop_ro("threads", [](const Runtime& runtime) { return runtime.pool->threads(); })
      .def("pack", &pack, "format"_a, "storage"_a, "in"_a, "rows"_a, "mapped"_a = false,
           "Packs uint8 rows[out, bytes] of a checkpoint. mapped: they lie in a shared map of a file; then they may be packed later, until\n"
           "finish_packing(), and their pages are given back to the system.")
      .def("allocate", [](Runtime& runtime, const std::string& format, const std::string& storage, int64_t out, int64_t in) {
             const auto layout = linear::choose_layout(named<linear::Format>(linear::kFormatNames, format), named<linear::Storage>(linear::kStorageNames, storage));
             return linear::PackedMatrix(runtime.arena, layout, out, in);
           }, "format"_a, "storage"_a, "out"_a, "in"_a, "What pack() would return, to be filled through its `packed` bytes.")
      .def("read", [](Runtime& runtime, const linear::PackedMatrix& matrix, std::string path) { return runtime.packer.read(matrix, std::move(path)); },
           "matrix"_a, "path"_a, "Fills a matrix from the start of a file in the background, until finish_packing(); what became of it.")
      .def("finish_packing", &finish_packing, "Waits for what is still being packed or read. To be called before a tape runs.")
      .def("enlarge_pages", [](Runtime& runtime, double seconds) {
             const nb::gil_scoped_release release;
             return runtime.packer.backing().enlarge(std::chrono::nanoseconds(static_cast<int64_t>(1e9 * seconds)));
           }, "seconds"_a, "Makes pages of packed weights huge that could not be at first, for so long, one at least; whether any are left.")
      .def("forget_pages", [](Runtime& runtime) { runtime.packer.backing().forget(); }, "Leaves them small.")
      .def("assume_slow_pages", [](Runtime& runtime) { runtime.packer.backing().assume_slow(); }, "For tests: as where huge pages take long to get.")
      .def_prop_ro("small_bytes", [](Runtime& runtime) { return runtime.packer.backing().small_bytes(); }, "Bytes that enlarge_pages() has still to do.")
      .def_prop_ro("bytes_given_back", [](const Runtime& runtime) { return runtime.packer.bytes_given_back(); })
      .def("multiply_add_rate", &multiply_add_rate, "rounds"_a, "float32 multiply-adds a second of all threads together.")
      .def("unpack", &unpack, "matrix"_a, "float32[out, in]: the numbers that a matrix holds.");
  bind_kv(m);
  bind_tape(m);
  bind_attention(m);
  nb::module_ amx_module = m.def_submodule("amx");
  bind_amx(amx_module);
  bind_checksum(m);
}

}  // namespace trivium
