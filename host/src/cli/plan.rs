//! `plan`: what a run would do, without a GPU.
use std::process::ExitCode;

use attn_backward::cross::Precision;
use attn_backward::{Error, Target, audio, cross, suite};

use super::check::PrecisionName;
use super::device::Module;
use super::output;

/// Options of `plan`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    operation: Operation,
    /// Kernel module to plan for.
    #[arg(long, value_enum, default_value = "hopper", global = true)]
    module: Module,
    /// Streaming multiprocessors of the GPU to plan for; an H200 has 132.
    #[arg(long, default_value_t = 132, global = true, value_parser = clap::value_parser!(u32).range(1..=4096))]
    num_sms: u32,
}

#[derive(clap::Subcommand)]
enum Operation {
    /// Operation A, its rows cut into chunks of equal length; or into any chunks, of which only bounds are known.
    Audio {
        /// Rows of the packed tensors.
        #[arg(long, default_value_t = 1280)]
        total_seq_len: usize,
        /// Chunks.
        #[arg(long, default_value_t = 20)]
        num_chunks: usize,
        /// Longest chunk: plan for any chunks of at most so many rows, instead of equal ones.
        #[arg(long)]
        max_chunk_len: Option<usize>,
        /// Heads of 64.
        #[arg(long, default_value_t = 20)]
        num_heads: usize,
    },
    /// Operation B.
    Cross {
        /// Arithmetic.
        #[arg(long, value_enum, default_value = "fast")]
        precision: PrecisionName,
        /// Batches.
        #[arg(long, default_value_t = 1)]
        batch_size: usize,
        /// Decoder tokens of a batch.
        #[arg(long, default_value_t = 1024)]
        seq_len_dec: usize,
        /// Encoder tokens of a batch.
        #[arg(long, default_value_t = 2048)]
        seq_len_enc: usize,
        /// Query heads.
        #[arg(long, default_value_t = 16)]
        num_heads: usize,
        /// Key/value heads.
        #[arg(long, default_value_t = 4)]
        num_kv_heads: usize,
        /// 64, 128 or 256.
        #[arg(long, default_value_t = 256)]
        head_dim: usize,
        /// Decoder width.
        #[arg(long, default_value_t = 1536)]
        hidden_size: usize,
        /// Encoder width.
        #[arg(long, default_value_t = 1024)]
        cross_hidden_size: usize,
    },
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let target = Target { num_sms: args.num_sms as usize, ..Target::h200(args.module.into()) };
    match args.operation {
        Operation::Audio { total_seq_len, num_chunks, max_chunk_len, num_heads } => {
            let shape = audio::Shape { total_seq_len, num_heads, scale: 0.125 };
            let plan = match max_chunk_len {
                Some(max_chunk_len) => {
                    let capacity = audio::Capacity { num_chunks, max_chunk_len };
                    audio::Plan::with_capacity(&shape, capacity, &target)?
                }
                None => {
                    let cu_seqlens = suite::balanced_cu_seqlens(total_seq_len, num_chunks)?;
                    audio::Plan::new(&shape, &cu_seqlens, &target)?
                }
            };
            output::line(plan)?;
        }
        Operation::Cross {
            precision,
            batch_size,
            seq_len_dec,
            seq_len_enc,
            num_heads,
            num_kv_heads,
            head_dim,
            hidden_size,
            cross_hidden_size,
        } => {
            let shape = cross::Shape {
                batch_size,
                seq_len_dec,
                seq_len_enc,
                num_heads,
                num_kv_heads,
                head_dim,
                hidden_size,
                cross_hidden_size,
            };
            output::line(cross::Plan::new(&shape, Precision::from(precision), &target)?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
