//! `audio`: operation A on a tensor file.
use std::path::PathBuf;
use std::process::ExitCode;

use attn_backward::file::{self, AudioOptions, Provenance};
use attn_backward::{DeviceName, Error, audio};

use super::device::{self, Module};
use super::output;

/// Options of `audio`.
#[derive(clap::Args)]
pub struct Args {
    /// Safetensors file with grad_output, hidden_states, query_states, key_states, value_states, cu_seqlens, q_weight, k_weight, v_weight
    /// and out_weight.
    #[arg(long)]
    input: PathBuf,
    /// Safetensors file to write the gradients to; replaced if it exists.
    #[arg(long)]
    output: PathBuf,
    /// cpu or cuda:N; by default the first GPU, or the CPU where there is none.
    #[arg(long)]
    device: Option<DeviceName>,
    /// Kernel module on a GPU; by default the best one.
    #[arg(long, value_enum)]
    module: Option<Module>,
    /// Factor of the logits; by default the file's metadata `scale`, or else 1 / sqrt(head_dim).
    #[arg(long)]
    scale: Option<f32>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let inputs = file::read_audio(&args.input, &AudioOptions { scale: args.scale })?;
    for (tensor, what) in file::non_finite_audio(&inputs) {
        eprintln!("warning: {tensor}: {what}; computed through");
    }
    let device = device::open(args.device, args.module)?;
    let gradients = audio::backward(&device, &inputs)?;
    file::write_audio_gradients(&args.output, &gradients, &Provenance { device: device.to_string(), precision: None })?;
    output::line(format_args!("{}: 9 gradients of operation A, computed on {device}", args.output.display()))?;
    Ok(ExitCode::SUCCESS)
}
