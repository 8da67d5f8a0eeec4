//! Operation A in two launches, `attention_fused_*` and the products, on the simulated GPU.

use attn_backward::audio::{self, Capacity, Gradients, Inputs, Plan, Shape};
use attn_backward::gpu::ModuleKind;
use attn_backward::suite::audio_inputs;
use attn_backward::{CuSeqlens, Target};
use attn_backward_tests::assertions::{assert_audio, bits};
use attn_backward_tests::examples::fill_rows_from;
use attn_backward_tests::simulated::{Simulator, hopper};
use attn_backward_tests::strategies::cu_seqlens_of;
use half::bf16;
use proptest::prelude::*;

/// A Hopper GPU of so many SMs: with few of them blocks take several products each.
fn target(num_sms: usize) -> Target {
    Target { num_sms, ..Target::h200(ModuleKind::Hopper) }
}

fn inputs(cu_seqlens: CuSeqlens, num_heads: usize, seed: u64) -> Inputs {
    let shape = Shape { total_seq_len: cu_seqlens.total_seq_len(), num_heads, scale: 0.125 };
    audio_inputs(seed, shape, cu_seqlens)
}

/// The gradients by the launches that are planned for these chunks, `runs` times; `None` without PTX.
fn run(inputs: &Inputs, num_sms: usize, runs: usize) -> Option<Gradients> {
    let shape = inputs.shape().unwrap();
    let plan = Plan::new(&shape, &inputs.cu_seqlens, &target(num_sms)).unwrap();
    let mut gpu = Simulator::hopper(num_sms as u32)?;
    Some(hopper::audio_backward(&mut gpu, inputs, &plan, runs, None))
}

fn assert_right(inputs: &Inputs, num_sms: usize, runs: usize) {
    if let Some(found) = run(inputs, num_sms, runs) {
        assert_audio(&found, &audio::reference::backward(inputs).unwrap());
    }
}

#[test]
fn kernels_of_every_size_give_the_gradients() {
    for len in [50, 75, 90, 120] {
        assert_right(&inputs(cu_seqlens_of(&[len, len - 9, 1], 0), 2, 1), 3, 1);
    }
}

#[test]
fn chunks_that_fill_the_kernel_and_empty_ones_give_the_gradients() {
    assert_right(&inputs(cu_seqlens_of(&[64, 3, 0, 17], 0), 3, 2), 6, 1);
    assert_right(&inputs(cu_seqlens_of(&[80, 3, 0, 65], 0), 3, 3), 6, 1);
    assert_right(&inputs(cu_seqlens_of(&[128, 97], 0), 3, 4), 2, 1);
}

#[test]
fn more_blocks_than_chunks_share_the_products() {
    assert_right(&inputs(cu_seqlens_of(&[70], 0), 2, 5), 9, 1);
}

#[test]
fn a_run_leaves_behind_what_the_next_one_needs() {
    let inputs = inputs(cu_seqlens_of(&[70, 20], 3), 2, 6);
    let (Some(once), Some(twice)) = (run(&inputs, 3, 1), run(&inputs, 3, 2)) else { return };
    assert_audio(&once, &audio::reference::backward(&inputs).unwrap());
    assert_eq!(bits(&once), bits(&twice));
}

#[test]
fn stages_are_filled_again_and_again() {
    // Five k-blocks: with two stages both phases of each come twice.
    for (len, stages) in [(64, 2), (80, 3), (96, 2), (128, 3)] {
        let inputs = inputs(cu_seqlens_of(&[len, 33], 0), 5, 7);
        let plan = Plan::new(&inputs.shape().unwrap(), &inputs.cu_seqlens, &target(5)).unwrap();
        let Some(mut gpu) = Simulator::hopper(5) else { return };
        let found = hopper::audio_backward_with_stages(&mut gpu, &inputs, &plan, stages, 1, None);
        assert_audio(&found, &audio::reference::backward(&inputs).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 32, ..ProptestConfig::default() })]

    #[test]
    fn any_chunks_inside_of_the_capacity_and_padding_reaches_nothing(
        lens in prop::collection::vec(prop_oneof![1 => Just(0), 1 => Just(1), 4 => 0..=128usize], 1..6),
        padding in prop_oneof![Just(0usize), 1..5usize, 60..70usize, 5..140usize],
        more_chunks in 0..4usize,
        num_heads in 2..=3usize,
        num_sms in prop::sample::select(vec![3usize, 5, 9]),
        // A block that is done long before the others, or none.
        ahead in prop::option::of(0..9u64),
        seed in any::<u64>(),
    ) {
        let cu_seqlens = cu_seqlens_of(&lens, padding);
        let (tokens, rows) = (cu_seqlens.padding().start, cu_seqlens.total_seq_len());
        prop_assume!(rows > 0);
        let shape = Shape { total_seq_len: rows, num_heads, scale: 0.125 };
        let capacity = Capacity {
            num_chunks: cu_seqlens.num_chunks() + more_chunks,
            max_chunk_len: cu_seqlens.max_chunk_len().max(1),
        };
        let mut inputs = audio_inputs(seed, shape, cu_seqlens);
        fill_rows_from(&mut inputs, tokens, bf16::NAN);
        // Planned for chunks of equal length, which may ask for a smaller kernel than the longest chunk takes.
        let plan = Plan::with_capacity(&shape, capacity, &target(num_sms)).unwrap();
        prop_assume!(plan.fused().is_some());
        let Some(mut gpu) = Simulator::hopper(num_sms as u32) else { return Ok(()) };
        let found = hopper::audio_backward(&mut gpu, &inputs, &plan, 1, ahead.filter(|&block| block < num_sms as u64));
        assert_audio(&found, &audio::reference::backward(&inputs).unwrap());
        let padding_rows = found.grad_hidden_states.outer_iter().skip(tokens);
        assert!(padding_rows.flatten().all(|x| x.to_bits() == 0));
    }
}
