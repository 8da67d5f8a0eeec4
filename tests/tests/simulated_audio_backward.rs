//! Operation A in one launch, `audio_backward`, on the simulated GPU.

use attn_backward::audio::{self, Plan, Shape};
use attn_backward::gpu::ModuleKind;
use attn_backward::suite::audio_inputs;
use attn_backward::{CuSeqlens, Target};
use attn_backward_tests::assertions::assert_audio;
use attn_backward_tests::simulated::{Simulator, hopper};
use attn_backward_tests::strategies::cu_seqlens_of;

/// A Hopper GPU of few SMs, so that teams take several items each.
fn target(num_sms: usize) -> Target {
    Target { num_sms, ..Target::h200(ModuleKind::Hopper) }
}

fn check(cu_seqlens: CuSeqlens, num_heads: usize, num_sms: usize, runs: usize) {
    let shape = Shape { total_seq_len: cu_seqlens.total_seq_len(), num_heads, scale: 0.125 };
    let plan = Plan::new(&shape, &cu_seqlens, &target(num_sms)).unwrap();
    let inputs = audio_inputs(1, shape, cu_seqlens);
    let Some(mut gpu) = Simulator::with(ModuleKind::Hopper) else { return };
    let found = hopper::audio_backward(&mut gpu, &inputs, &plan, runs);
    assert_audio(&found, &audio::reference::backward(&inputs).unwrap());
}

#[test]
fn teams_of_every_size_give_the_gradients() {
    for len in [50, 75, 90, 120] {
        check(cu_seqlens_of(&[len, len - 9, 1], 0), 2, 2, 1);
    }
}
