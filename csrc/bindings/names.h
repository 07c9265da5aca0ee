// Values of the core by the names that Python has for them.
#pragma once
#include <map>
#include <stdexcept>
#include <string>

namespace karvan::bindings {

template <class T>
T named(const std::map<std::string, T>& names, const std::string& name, const char* what) {
  auto found = names.find(name);
  if (found == names.end()) throw std::invalid_argument(std::string("Unknown ") + what + " '" + name + "'.");
  return found->second;
}

template <class T>
std::string name_of(const std::map<std::string, T>& names, T value) {
  for (const auto& [name, known] : names)
    if (known == value) return name;
  throw std::logic_error("a value without a name");
}

}  // namespace karvan::bindings
