// The device's random numbers: torch's CPU generator, one for each device index.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace swap_adam {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// The CPU generator behind one of ours; a CPU generator is returned as it is.
at::CPUGeneratorImpl* cpu_generator_of(const at::Generator& generator);

}  // namespace swap_adam
