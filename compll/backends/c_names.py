# SPDX-License-Identifier: Apache-2.0
"""Words of C++, of the runtime and of the generated code: no variable of a user has their names.

What is a name in a specification need not be one in C++. A variable with such a name gets another
(`c_common.Names`); a test compares the list with the headers and with what is generated.
"""

import re

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class
compl const const_cast constexpr continue decltype default delete do double dynamic_cast else enum
explicit export extern false float for friend goto if inline int long mutable namespace new noexcept
not not_eq nullptr operator or or_eq private protected public register reinterpret_cast return short
signed sizeof static static_assert static_cast struct switch template this thread_local throw true
try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
linux unix
"""
# What generated functions use themselves, and what they call.
_OWN = """
add_all add_tile begin bodies check_body encode_feedback encode_fields encode_tiles end exact
feedback_fields gradient decode_fields how is_first is_part merge merge_ranges merge_rows mode
new_residual put_tile reserve residual rows kRows state stream_end stream_tile sum to abs add
all_finite base bits_float body buffer bytes canonical_bits capacity code_at codec_hash codes count
decode decode_rows encode exp2_exact finish first first_block float_at float_bits float_key
float_to_code float_to_int for_blocks for_tiles is_finite num_blocks sum_codes float_to_uint32 in
in_place_fields int_abs int_add int_div int_mul int_neg int_rem int_shl int_shr int_sub is_block j k
is_in_place keep_range keep_state keep_values key key_float layout load_code load_float load_floats
log2_exact main max_body_bytes maximum minimum n noise noise_at noise_tile old out pack_codes
packed_bytes params power_of_two random_float random_int read_params reduce_blocks reduce_int_blocks
reduce_tile round_half_away run scratch sign_of sort_values spread_blocks status std store_code held
store_float store_floats sum_tile take_indices tf_hips unpack_codes value value_at values
wide_noise_at for_steps for_ranges_back hidden at late value_or prefetch_again prefetch_blocks
prefetch_page prefetch_sums prefetch_tile wide_noise_tile wide_random_int packed_bits
find_second_level is_zen4 is_skylake_server is_wide_processor num_fetched prefetch_line mirror_tile
with_packed_width random_int32 bounded_max bounded_min whole_part random_unit row_table
decode_most_rows find_past_caches num_processors prefetch_store stream_line stream_half
get_nprocs keep_bits
"""
# What the headers of the runtime and of its CUDA half declare or call besides.
_RUNTIME = """
add_all_noting add_between add_blocks add_blocks_of add_bytes add_field add_lane add_parts
add_placed add_signed add_some add_steps add_tasks add_weighted add_within address_of among_bands
are_aligned arrive at_once atomicAdd atomicMin before_halves begins_early bits bits_below
bits_of_bytes bits_of_flags bits_of_lanes block_number blockDim blockIdx blocks_at_once
blocks_of_one_word blocks_wide bytes_of_rows bytes_of_words call can_write change check_prefix
chosen_of clear_flag clear_tile codes_of_bytes combine_lanes combine_row compared complain copy_left
copy_tile count_before count_bits count_of cudaDeviceGetAttribute cudaFuncSetAttribute cudaGetDevice
cudaGetErrorString cudaGetLastError cudaLaunchKernelEx cudaOccupancyMaxActiveBlocksPerMultiprocessor
cut deal_tiles defined divide each each_first each_four each_kept each_key each_left eight_of
elements end_block end_of_block error_text exchange exchange_some extreme_found fetch fetch_ahead
few_of few_parts find_group find_key find_largest find_largest_of find_machine find_spot finished
finite_all finite_blocks flag_bits flags_of flags_of_bits fmaf fmaxf fminf fnv1a fold fold_few
fold_found fold_lane fold_padded fold_pairs fold_parts fold_rows fold_wide follow for_bits for_flags
four gather_bits getter gridDim group_base guess guess_least hadamard_begin hadamard_block
hadamard_blocks hadamard_each hadamard_end hadamard_last hadamard_pairs hadamard_pass hadamard_plain
hadamard_scale hadamard_tile hadamard_turns half_butterflies half_stage has_compression
has_half_compression held_memory held_or held_value high_halves high_product hold_units is_aligned
is_allowed is_at_once is_few_picks is_few_tiles is_fine is_left is_line is_noise_whole is_signed
is_wanted join join_bits join_doubles join_found join_fours join_group join_lanes join_parts
join_share join_shares join_twos joined joined_whole keep_blocks keep_candidates keep_eight
keep_finite keep_padded keep_where kept_before kernel key_at kGroups kth_largest lane_of lanes
larger_size largest_near largest_of largest_of_threads largest_of_warp largest_or_nan largest_size
last_error launch_early launch_held launch_pack launched lay_out least least_float least_value
leave_tile load_all load_eight load_four load_one load_some load_steps load_word lowest_bit machine
made_by madvise majority_of make_finite make_layout mask median_of memcpy mixed more most
most_before nearest_mean needed neutral next Noise noise_group_neon noise_neon noise_wide
noise_words NoiseOfEight not_kept note note_broken note_extreme note_first note_kept note_no_first
num_packers num_runs num_samples num_tiles number_bits numbers_as_row of_pair of_parts one
order_of_kept pack8_by pack_counted pack_groups pack_many_words pack_neon pack_stream pack_tiles
pack_wide pack_words padded padded_count pair pair_butterflies Parts philox philox_keys philox_round
pick pick_bin pick_made pick_sorted place place_of place_of_four prefetch_bytes prefetch_packet put
put8_by put_by_warps put_codes8_by put_ends put_half put_row put_rows range rank_key ranked reduce
reduce_found reduce_padded reduce_rows residual_tile row_abs row_at row_bits row_both
row_butterflies row_bytes row_clamped row_codes row_compared row_count row_difference row_either
row_every_code row_finite row_held row_is_at_least row_is_at_most row_is_equal row_is_less
row_is_more row_is_set row_is_unequal row_largest row_left row_looked_up row_low_bits row_maximum
row_minimum row_mirrored row_noise row_number row_number_is_at_least row_number_is_at_most
row_number_is_equal row_number_is_less row_number_is_more row_number_is_unequal row_number_select
row_of row_of_codes row_of_flags row_of_number row_packed row_plus_noise row_select row_stage
row_store row_stream row_sum row_whole_noise rule_of run_of run_top_k sample_place sample_rank
say_done scale_of_block scaled_noise scan_threads scan_tiles scatter_bits shared shifted sign
sign_turned size_for sort_all sort_half sort_key sort_keys sort_rest sort_steps sorted_few
sorted_few_or_none sorted_halves sorted_many sorted_value sorter span_of split_twos split_words
spread_weights stage_of_eight stages_of_eight stages_of_rows start start_block step steps_of
store_bits store_codes store_some stream_on_wide stream_wide sum_at sum_below sum_found sum_group
sum_neon sum_of sum_of_team sum_of_warp sum_threads sum_wide sum_within summed sweep table_of take
take_half take_neon take_parts take_rows take_sums take_tile taken task_of threadIdx three_stages
top top_k_alone top_k_wide trimmed_mean two_stages unit unless unpack8_by unpack_groups
unpack_many_words unpack_neon unpack_stream unpack_wide unpack_words upwards use used value_of
wait_for warpSize whole_bits WholeCode with_bits within_groups word_of words_of_noise write
write_prefix write_staged write_until xor_all
"""
RESERVED = frozenset((_KEYWORDS + _OWN + _RUNTIME).split())
# Types, constants and macros of the runtime and of C begin with capitals or k, or end in _t; digits
# are for numbering.
_PATTERN = re.compile(r"[A-Z].+|k[A-Z].*|tf_hips_.*|.*_t|.*[0-9]")


def is_reserved(name: str) -> bool:
    """Whether a variable of a user must have another name in C++."""
    return name in RESERVED or _PATTERN.fullmatch(name) is not None
