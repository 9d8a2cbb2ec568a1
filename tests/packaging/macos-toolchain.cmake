# Configures for macOS on a machine without its compiler, SDK or linker tools: CMake takes Apple's code paths, checks
# compile with the compiler that is here, nothing is linked.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_SYSTEM_VERSION 23.0.0)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_OSX_SYSROOT "" CACHE PATH "")
set(CMAKE_INSTALL_NAME_TOOL "true" CACHE FILEPATH "")
foreach (name FOUNDATION_LIBRARY METAL_FRAMEWORK METALKIT_FRAMEWORK ACCELERATE_FRAMEWORK)
    set(${name} "/sdk/${name}.framework" CACHE FILEPATH "")
endforeach()
