// Cases with answers in float64 and limits on the error, read from the file that native_case_file.py describes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/half.h"

struct Array {
    std::string type;
    std::vector<int64_t> shape;
    std::vector<char> bytes;

    int64_t count() const {
        int64_t product = 1;
        for (int64_t size : shape) product *= size;
        return product;
    }
    int64_t element() const {
        return type == "bool" ? 1 : type == "bfloat16" || type == "float16" ? 2 : type == "float32" ? 4 : 8;
    }
    template <typename T>
    T as(int64_t i) const {
        T x;
        std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
        return x;
    }
    double at(int64_t i) const {
        if (type == "float32") return as<float>(i);
        if (type == "float64") return as<double>(i);
        if (type == "int64") return double(as<int64_t>(i));
        if (type == "float16") return rlhf::to_float(as<rlhf::Float16>(i));
        return rlhf::to_float(as<rlhf::BFloat16>(i));
    }
};

// The largest error, its root mean square, that of the worst row, and the error in units of the last place.
struct Limits {
    double largest, rms, row, ulp;
};

struct Want {
    Limits limits;
    Array exact;
};

class Case {
public:
    std::string op, label;
    std::map<std::string, Array> arrays;
    std::map<std::string, double> numbers;
    std::map<std::string, Want> wants;
    std::map<std::string, Array> results;

    bool has(const std::string& name) const { return arrays.count(name) > 0; }
    const Array& array(const std::string& name) const { return find(arrays, name); }
    double number(const std::string& name) const { return find(numbers, name); }
    int64_t size(const std::string& name, int dimension) const { return array(name).shape.at(dimension); }
    bool bf16(const std::string& name) const { return array(name).type == "bfloat16"; }

    // Elements of an array; null if the case has none.
    void* data(const std::string& name) { return has(name) ? arrays[name].bytes.data() : nullptr; }
    template <typename T>
    T* data(const std::string& name) {
        return static_cast<T*>(data(name));
    }

    // Memory for a result, in the shape of its answer and full of NaN.
    void* out(const std::string& name, const std::string& type) {
        Array& made = results[name];
        made = {type, find(wants, name).exact.shape, {}};
        made.bytes.assign(made.count() * made.element(), char(0xff));
        return made.bytes.data();
    }
    float* floats(const std::string& name) { return static_cast<float*>(out(name, "float32")); }
    double* doubles(const std::string& name) { return static_cast<double*>(out(name, "float64")); }
    int64_t* integers(const std::string& name) { return static_cast<int64_t*>(out(name, "int64")); }

    // The largest error of any result as a part of what is allowed (above 1: not allowed), and whose it is.
    double compare(std::string& whose) const {
        double worst = 0;
        for (const auto& [name, want] : wants) {
            const double part = share(find(results, name), want);
            if (part >= worst) {
                worst = part;
                whose = name;
            }
        }
        return worst;
    }

private:
    template <typename T>
    static const T& find(const std::map<std::string, T>& from, const std::string& name) {
        const auto found = from.find(name);
        if (found == from.end()) throw std::runtime_error("no " + name + " in the case");
        return found->second;
    }

    static double share(const Array& got, const Want& want) {
        constexpr double kNever = std::numeric_limits<double>::infinity();
        const int64_t count = want.exact.count(), rows = want.exact.shape.empty() ? 1 : want.exact.shape[0];
        double largest = 0, ulp = 0, total = 0, worst_row = 0;
        for (int64_t r = 0; r < rows && count > 0; ++r) {
            double row = 0;
            for (int64_t i = r * (count / rows); i < (r + 1) * (count / rows); ++i) {
                const double x = got.at(i), exact = want.exact.as<double>(i);
                if (!std::isfinite(exact)) {
                    if (std::isnan(exact) ? !std::isnan(x) : x != exact) return kNever;
                    continue;
                }
                if (!std::isfinite(x)) return kNever;
                const double error = std::abs(x - exact);
                const double epsilon = got.type == "bfloat16" ? 0x1p-7 : got.type == "float16" ? 0x1p-10 : 0x1p-23;
                const double size = std::max(std::abs(exact), 0x1p-126);
                largest = std::max(largest, error);
                ulp = std::max(ulp, error / (std::exp2(std::floor(std::log2(size))) * epsilon));
                row += error * error;
            }
            total += row;
            worst_row = std::max(worst_row, std::sqrt(row / double(count / rows)));
        }
        const auto part = [](double error, double limit) {
            return error == 0 ? 0 : limit == 0 ? kNever : error / limit;
        };
        const double rms = count ? std::sqrt(total / double(count)) : 0;
        return std::max(std::max(part(largest, want.limits.largest), part(rms, want.limits.rms)),
                        std::max(part(worst_row, want.limits.row), part(ulp, want.limits.ulp)));
    }
};

inline Array read_array(std::istream& words, std::istream& file, const std::string& type) {
    Array x{type, {}, {}};
    size_t dimensions = 0;
    words >> dimensions;
    x.shape.resize(dimensions);
    for (int64_t& size : x.shape) words >> size;
    x.bytes.resize(x.count() * x.element());
    file.read(x.bytes.data(), int64_t(x.bytes.size()));
    return x;
}

inline std::vector<Case> read_cases(const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(std::string("cannot read ") + path);
    std::vector<Case> cases;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string kind, name, type;
        words >> kind >> name;
        if (kind == "case") {
            cases.emplace_back();
            cases.back().op = name;
            words >> cases.back().label;
        } else if (kind == "number") {
            words >> cases.back().numbers[name];
        } else if (kind == "array") {
            words >> type;
            cases.back().arrays[name] = read_array(words, file, type);
        } else if (kind == "want") {
            double limit[4];
            for (double& x : limit) {
                words >> type;
                x = std::strtod(type.c_str(), nullptr);  // knows "inf"
            }
            cases.back().wants[name] = {{limit[0], limit[1], limit[2], limit[3]}, read_array(words, file, "float64")};
        } else if (kind != "end") {
            throw std::runtime_error("not a line of a case: " + line);
        }
    }
    if (cases.empty()) throw std::runtime_error("no cases");
    return cases;
}
