//! `cross`: operation B on a tensor file.
use std::path::PathBuf;
use std::process::ExitCode;

use attn_backward::cross::Precision;
use attn_backward::file::{self, CrossOptions, Provenance};
use attn_backward::{Device, DeviceName, Error, cross};

use super::check::PrecisionName;
use super::device::{self, Module};
use super::output;

/// Options of `cross`.
#[derive(clap::Args)]
pub struct Args {
    /// Safetensors file with grad_query_states, grad_key_states, grad_value_states, decoder_hidden_states, encoder_hidden_states, q_weight,
    /// k_weight and v_weight.
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
    /// Arithmetic on a GPU; the CPU computes in fp32.
    #[arg(long, value_enum, default_value = "fast")]
    precision: PrecisionName,
    /// Key/value heads; by default the file's metadata `num_kv_heads`, or else the rows of k_weight / head_dim.
    #[arg(long)]
    num_kv_heads: Option<usize>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let inputs = file::read_cross(&args.input, &CrossOptions { num_kv_heads: args.num_kv_heads })?;
    for (tensor, what) in file::non_finite_cross(&inputs) {
        eprintln!("warning: {tensor}: {what}; computed through");
    }
    let device = device::open(args.device, args.module)?;
    let precision: Precision = args.precision.into();
    let gradients = cross::backward(&device, &inputs, precision)?;
    let (precision, arithmetic) = match device {
        Device::Cpu => (None, "fp32".to_string()),
        Device::Gpu { .. } => (Some(precision), format!("{precision} precision")),
    };
    file::write_cross_gradients(&args.output, &gradients, &Provenance { device: device.to_string(), precision })?;
    output::line(format_args!(
        "{}: 5 gradients of operation B, computed on {device} in {arithmetic}",
        args.output.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
