# SPDX-License-Identifier: Apache-2.0
"""The part of rules_cc that Bazel 4.2.3 loads itself: its native rules under their public names."""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_proto_library = native.cc_proto_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
objc_library = native.objc_library
