// SPDX-License-Identifier: Apache-2.0
// The operations of codecs that are loaded while the program runs (tf_hips.load), and momentum
// before any codec: built once, for all of them. The attribute `codec` names the codec; `integers`
// and `floats` are the values of its parameters of these kinds, in the order of the specification.
#include "tf_hips/cc/tf/codec_ops.h"
#include "tf_hips/cc/tf/gpu_kernels.h"
#include "tf_hips/cc/tf/refuse_xla.h"

namespace {

// No codec of its own: kernels and shape functions look at the attribute.
const TfHipsCodec* by_attribute() { return nullptr; }

}  // namespace

REGISTER_OP("TfHips>LoadedEncode")
    .Input("gradient: float")
    .Input("seed: int64")
    .Input("step: int64")
    .Output("packet: uint8")
    .Attr("codec: string")
    .Attr("integers: list(int) = []")
    .Attr("floats: list(float) = []")
    .Attr("tensor_id: int = 0")
    .Attr("offset: int = 0")
    .SetShapeFn(tf_hips::EncodeShape<by_attribute>)
    .Doc(R"doc(Encodes a gradient of any shape to its packets, concatenated.)doc");
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedEncode").Device(tensorflow::DEVICE_CPU),
                        tf_hips::EncodeOp<by_attribute>);
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedEncode")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("seed")
                            .HostMemory("step"),
                        tf_hips::GpuEncodeOp<by_attribute>);
TF_HIPS_REFUSE_XLA("TfHips>LoadedEncode");

REGISTER_OP("TfHips>LoadedEncodeFeedback")
    .Input("gradient: float")
    .Input("residual: float")
    .Input("seed: int64")
    .Input("step: int64")
    .Output("packet: uint8")
    .Output("new_residual: float")
    .Attr("codec: string")
    .Attr("integers: list(int) = []")
    .Attr("floats: list(float) = []")
    .Attr("tensor_id: int = 0")
    .Attr("offset: int = 0")
    .SetShapeFn(tf_hips::EncodeFeedbackShape<by_attribute>)
    .Doc(
        R"doc(Encodes gradient + residual; new_residual is what the packet does not hold of it.)doc");
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedEncodeFeedback").Device(tensorflow::DEVICE_CPU),
                        tf_hips::EncodeFeedbackOp<by_attribute>);
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedEncodeFeedback")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("seed")
                            .HostMemory("step"),
                        tf_hips::GpuEncodeFeedbackOp<by_attribute>);
TF_HIPS_REFUSE_XLA("TfHips>LoadedEncodeFeedback");

REGISTER_OP("TfHips>LoadedEncodeState")
    .Input("gradient: float")
    .Input("state: float")
    .Input("seed: int64")
    .Input("step: int64")
    .Output("packet: uint8")
    .Output("new_state: float")
    .Attr("codec: string")
    .Attr("integers: list(int) = []")
    .Attr("floats: list(float) = []")
    .Attr("tensor_id: int = 0")
    .Attr("offset: int = 0")
    .SetShapeFn(tf_hips::EncodeStateShape<by_attribute>)
    .Doc(R"doc(Encodes a gradient of any shape; state has a row for each vector that is kept.)doc");
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedEncodeState").Device(tensorflow::DEVICE_CPU),
                        tf_hips::EncodeStateOp<by_attribute>);
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedEncodeState")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("seed")
                            .HostMemory("step"),
                        tf_hips::GpuEncodeStateOp<by_attribute>);
TF_HIPS_REFUSE_XLA("TfHips>LoadedEncodeState");

REGISTER_OP("TfHips>LoadedDecode")
    .Input("packet: uint8")
    .Output("gradient: float")
    .Attr("codec: string")
    .Attr("integers: list(int) = []")
    .Attr("floats: list(float) = []")
    .Attr("num_elements: int >= 0")
    .SetShapeFn(tf_hips::DecodeShape<by_attribute>)
    .Doc(R"doc(Decodes packets to a vector of num_elements floats.)doc");
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedDecode").Device(tensorflow::DEVICE_CPU),
                        tf_hips::DecodeOp<by_attribute>);
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedDecode").Device(tensorflow::DEVICE_GPU),
                        tf_hips::GpuDecodeOp<by_attribute>);
TF_HIPS_REFUSE_XLA("TfHips>LoadedDecode");

REGISTER_OP("TfHips>LoadedMerge")
    .Input("packets: uint8")
    .Output("sum: float")
    .Attr("codec: string")
    .Attr("integers: list(int) = []")
    .Attr("floats: list(float) = []")
    .Attr("num_elements: int >= 0")
    .SetShapeFn(tf_hips::MergeShape<by_attribute>)
    .Doc(R"doc(Sums the vectors in the rows of packets, in their order.)doc");
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedMerge").Device(tensorflow::DEVICE_CPU),
                        tf_hips::MergeOp<by_attribute>);
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedMerge").Device(tensorflow::DEVICE_GPU),
                        tf_hips::GpuMergeOp<by_attribute>);
TF_HIPS_REFUSE_XLA("TfHips>LoadedMerge");

REGISTER_OP("TfHips>LoadedMergeEncode")
    .Input("packets: uint8")
    .Input("residual: float")
    .Input("seed: int64")
    .Input("step: int64")
    .Output("packet: uint8")
    .Output("new_residual: float")
    .Attr("codec: string")
    .Attr("integers: list(int) = []")
    .Attr("floats: list(float) = []")
    .Attr("num_elements: int >= 0")
    .Attr("tensor_id: int = 0")
    .Attr("offset: int = 0")
    .SetShapeFn(tf_hips::MergeEncodeShape<by_attribute>)
    .Doc(
        R"doc(Encodes residual + the sum of the rows of packets; new_residual is what is left.)doc");
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedMergeEncode").Device(tensorflow::DEVICE_CPU),
                        tf_hips::MergeEncodeOp<by_attribute>);
REGISTER_KERNEL_BUILDER(Name("TfHips>LoadedMergeEncode")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("seed")
                            .HostMemory("step"),
                        tf_hips::GpuMergeEncodeOp<by_attribute>);
TF_HIPS_REFUSE_XLA("TfHips>LoadedMergeEncode");

// For CPUs: on a GPU ops.graph makes the running mean of TensorFlow's own operations.
REGISTER_OP("TfHips>EncodeMomentum")
    .Input("gradient: float")
    .Input("kept: float")
    .Input("seed: int64")
    .Input("step: int64")
    .Output("packet: uint8")
    .Output("new_kept: float")
    .Attr("codec: string")
    .Attr("integers: list(int) = []")
    .Attr("floats: list(float) = []")
    .Attr("beta: float")
    .Attr("feedback: bool")
    .Attr("tensor_id: int = 0")
    .Attr("offset: int = 0")
    .SetShapeFn(tf_hips::EncodeStateShape<by_attribute>)
    .Doc(
        R"doc(Encodes a running mean of gradients, the first row of kept; a residual is the second.)doc");
REGISTER_KERNEL_BUILDER(Name("TfHips>EncodeMomentum").Device(tensorflow::DEVICE_CPU),
                        tf_hips::EncodeMomentumOp<by_attribute>);
TF_HIPS_REFUSE_XLA("TfHips>EncodeMomentum");
