//! The program from outside: files in and out, error lines, exit codes. It never sees a GPU here, whether the machine has one or not.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use attn_backward::file::{write_audio_inputs, write_cross_inputs};
use attn_backward::suite::{audio_inputs, cross_inputs};
use attn_backward::{CuSeqlens, audio, cross};
use half::bf16;
use ndarray::ArrayViewD;
use predicates::prelude::*;
use predicates::str::{contains, ends_with, is_empty, starts_with};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::{TempDir, tempdir};

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attn-backward"));
    command.env("CUDA_VISIBLE_DEVICES", "");
    command
}

/// A folder with the inputs of an operation, and old gradients where the new ones will go.
struct Folder {
    folder: TempDir,
    operation: &'static str,
}

const OLD: &[u8] = b"the gradients of an earlier run";

impl Folder {
    fn audio(inputs: &audio::Inputs) -> Folder {
        let folder = Folder { folder: tempdir().unwrap(), operation: "audio" };
        write_audio_inputs(&folder.input(), inputs).unwrap();
        fs::write(folder.output(), OLD).unwrap();
        folder
    }

    fn cross(inputs: &cross::Inputs) -> Folder {
        let folder = Folder { folder: tempdir().unwrap(), operation: "cross" };
        write_cross_inputs(&folder.input(), inputs).unwrap();
        fs::write(folder.output(), OLD).unwrap();
        folder
    }

    fn input(&self) -> PathBuf {
        self.folder.path().join("inputs.safetensors")
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("gradients.safetensors")
    }

    /// The command from input to output, on the CPU unless `options` say otherwise.
    fn command(&self, options: &[&str]) -> Command {
        let mut command = program();
        command.arg(self.operation).arg("--input").arg(self.input()).arg("--output").arg(self.output());
        if !options.contains(&"--device") {
            command.args(["--device", "cpu"]);
        }
        command.args(options);
        command
    }

    /// Runs it and fails unless it says exactly one line that starts and ends so, with exit code 1, and leaves the folder as it was.
    #[track_caller]
    fn assert_refused(&self, options: &[&str], start: &str, end: &str) {
        let one_line = predicate::function(|text: &str| text.ends_with('\n') && text.matches('\n').count() == 1);
        self.command(options)
            .assert()
            .code(1)
            .stdout(is_empty())
            .stderr(one_line.and(starts_with(format!("error: {start}"))).and(ends_with(format!("{end}\n"))));
        assert_eq!(fs::read(self.output()).unwrap(), OLD, "the old output is untouched");
        self.assert_holds_no_other_file();
    }

    /// As `assert_refused`, of a message that begins with the input file's path.
    #[track_caller]
    fn assert_input_refused(&self, message: &str) {
        self.assert_refused(&[], &format!("{}: ", self.input().display()), message);
    }

    #[track_caller]
    fn assert_holds_no_other_file(&self) {
        let mut names: Vec<_> =
            fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["gradients.safetensors", "inputs.safetensors"]);
    }

    /// Rewrites the input after `change` on its tensors and metadata.
    fn change(&self, change: impl FnOnce(&mut HashMap<String, Tensor>, &mut HashMap<String, String>)) {
        let bytes = fs::read(self.input()).unwrap();
        let (mut tensors, mut metadata) = parse(&bytes);
        change(&mut tensors, &mut metadata);
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, Some(metadata), &self.input()).unwrap();
    }
}

type Tensor = (Dtype, Vec<usize>, Vec<u8>);

fn parse(bytes: &[u8]) -> (HashMap<String, Tensor>, HashMap<String, String>) {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let tensor = |(name, view): (&str, TensorView<'_>)| {
        (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    (tensors.iter().map(tensor).collect(), header.metadata().clone().unwrap_or_default())
}

/// Fails unless the file holds exactly these gradients; returns its metadata.
#[track_caller]
fn assert_holds<T: Copy>(
    path: &Path,
    dtype: Dtype,
    gradients: &[(&'static str, ArrayViewD<'_, T>)],
    bytes_of: impl Fn(T) -> Vec<u8>,
) -> HashMap<String, String> {
    let (tensors, metadata) = parse(&fs::read(path).unwrap());
    assert_eq!(tensors.len(), gradients.len());
    for (name, gradient) in gradients {
        let (stored_dtype, shape, bytes) = &tensors[*name];
        assert_eq!((*stored_dtype, shape.as_slice()), (dtype, gradient.shape()), "{name}");
        let expected: Vec<u8> = gradient.iter().flat_map(|x| bytes_of(*x)).collect();
        assert!(*bytes == expected, "{name}");
    }
    metadata
}

fn audio_example() -> audio::Inputs {
    let cu_seqlens = CuSeqlens::new(&[0, 20, 20, 53], 60).unwrap();
    audio_inputs(1, audio::Shape { total_seq_len: 60, num_heads: 2, scale: 0.2 }, cu_seqlens)
}

fn cross_example() -> cross::Inputs {
    let shape = cross::Shape {
        batch_size: 2,
        seq_len_dec: 3,
        seq_len_enc: 4,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        hidden_size: 16,
        cross_hidden_size: 8,
    };
    cross_inputs(2, shape)
}

fn bf16_bytes(x: bf16) -> Vec<u8> {
    x.to_le_bytes().to_vec()
}

fn f32_bytes(x: f32) -> Vec<u8> {
    x.to_le_bytes().to_vec()
}

#[test]
fn audio_writes_the_librarys_gradients_and_how_they_were_computed() {
    let inputs = audio_example();
    let folder = Folder::audio(&inputs);
    let said = format!("{}: 9 gradients of operation A, computed on cpu\n", folder.output().display());
    folder.command(&[]).assert().success().stdout(said).stderr(is_empty());
    let expected = audio::cpu::backward(&inputs).unwrap();
    let metadata = assert_holds(&folder.output(), Dtype::BF16, &expected.tensors(), bf16_bytes);
    assert_eq!((metadata["operation"].as_str(), metadata["device"].as_str()), ("audio", "cpu"));
    folder.assert_holds_no_other_file();

    folder.command(&["--scale", "0.25"]).assert().success();
    let expected = audio::cpu::backward(&audio::Inputs { scale: 0.25, ..inputs }).unwrap();
    assert_holds(&folder.output(), Dtype::BF16, &expected.tensors(), bf16_bytes);
}

#[test]
fn cross_writes_the_librarys_gradients_and_how_they_were_computed() {
    let inputs = cross_example();
    let folder = Folder::cross(&inputs);
    let said = format!("{}: 5 gradients of operation B, computed on cpu in fp32\n", folder.output().display());
    let expected = cross::cpu::backward(&inputs).unwrap();
    for options in [&[][..], &["--precision", "high"], &["--num-kv-heads", "2"]] {
        folder.command(options).assert().success().stdout(said.clone()).stderr(is_empty());
        let metadata = assert_holds(&folder.output(), Dtype::F32, &expected.tensors(), f32_bytes);
        assert_eq!((metadata["operation"].as_str(), metadata["device"].as_str()), ("cross", "cpu"));
        // The CPU has one arithmetic; a file does not claim another.
        assert!(!metadata.contains_key("precision"));
        folder.assert_holds_no_other_file();
    }
}

#[test]
fn without_a_gpu_the_default_is_the_cpu_and_a_line_says_so() {
    let folder = Folder::audio(&audio_example());
    let mut command = program();
    command.args(["audio", "--input"]).arg(folder.input()).arg("--output").arg(folder.output());
    command
        .assert()
        .success()
        .stdout(ends_with("computed on cpu\n"))
        .stderr(starts_with("note: ").and(contains("CPU")));
}

#[test]
fn a_gpu_that_is_not_there_is_one_line_and_the_output_stays() {
    for folder in [Folder::audio(&audio_example()), Folder::cross(&cross_example())] {
        // Without a driver the line says that there is none; with one, which is told to hide its GPUs, that it sees none.
        let says = contains("no CUDA driver found").or(contains("there is no GPU 0: the driver sees 0"));
        folder.assert_refused(&["--device", "cuda:0"], "", "");
        folder.command(&["--device", "cuda:0"]).assert().code(1).stderr(says);
    }
}

#[test]
fn non_finite_inputs_are_reported_and_computed_through() {
    let mut inputs = audio_example();
    inputs.grad_output[[3, 5]] = bf16::NAN;
    inputs.key_states[[0, 1, 30, 2]] = bf16::INFINITY;
    let folder = Folder::audio(&inputs);
    let warnings = "warning: grad_output: 1 non-finite value, the first in row [3]; computed through\n\
                    warning: key_states: 1 non-finite value, the first in row [0, 1, 30]; computed through\n";
    folder.command(&[]).assert().success().stderr(warnings);
    let (tensors, _) = parse(&fs::read(folder.output()).unwrap());
    assert_eq!(tensors.len(), 9);
}

#[test]
fn missing_and_misnamed_tensors_are_named() {
    let folder = Folder::audio(&audio_example());
    folder.change(|tensors, _| {
        let tensor = tensors.remove("k_weight").unwrap();
        tensors.insert("k_proj_weight".into(), tensor);
    });
    folder.assert_input_refused("tensor k_weight is missing; did you mean to rename k_proj_weight?");

    let folder = Folder::cross(&cross_example());
    folder.change(|tensors, _| drop(tensors.remove("v_weight")));
    folder.assert_input_refused(
        "tensor v_weight is missing; found decoder_hidden_states, encoder_hidden_states, grad_key_states, \
         grad_query_states, grad_value_states, k_weight, q_weight",
    );
}

#[test]
fn wrong_dtypes_and_shapes_are_named_with_expected_and_found() {
    let folder = Folder::audio(&audio_example());
    folder.change(|tensors, _| tensors.get_mut("v_weight").unwrap().0 = Dtype::F16);
    folder.assert_input_refused("tensor v_weight: expected dtype BF16, found F16; convert it before saving");

    let folder = Folder::audio(&audio_example());
    folder.change(|tensors, _| tensors.get_mut("query_states").unwrap().1 = vec![2, 60, 64]);
    folder.assert_input_refused(
        "tensor query_states: expected shape [1, num_heads, total_seq_len, 64], found [2, 60, 64]",
    );

    let folder = Folder::cross(&cross_example());
    folder.change(|tensors, _| tensors.get_mut("decoder_hidden_states").unwrap().1 = vec![1, 6, 16]);
    folder.assert_input_refused("decoder_hidden_states: expected shape [2, 3, 16], found [1, 6, 16]");
}

#[test]
fn bad_offsets_and_scalars_are_named() {
    let offsets = |values: [i32; 4]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let cases = [
        ([0, 20, 10, 53], "cu_seqlens[2] = 10: offsets do not decrease, and the one before is 20"),
        ([2, 20, 20, 53], "cu_seqlens[0] = 2: the first offset is 0"),
        ([0, 20, 20, 61], "cu_seqlens[3] = 61: offsets do not exceed total_seq_len = 60"),
        ([0, -1, 20, 53], "cu_seqlens[1] = -1: offsets are not negative"),
    ];
    for (values, message) in cases {
        let folder = Folder::audio(&audio_example());
        folder.change(|tensors, _| tensors.get_mut("cu_seqlens").unwrap().2 = offsets(values));
        folder.assert_input_refused(message);
    }
    let folder = Folder::audio(&audio_example());
    folder.change(|_, metadata| drop(metadata.insert("scale".into(), "one".into())));
    folder.assert_input_refused("metadata scale: expected a number, found \"one\"");
    let end = "scale = -1 is not supported: finite and greater than 0";
    Folder::audio(&audio_example()).assert_refused(&["--scale=-1"], "", end);

    let folder = Folder::cross(&cross_example());
    folder.change(|tensors, metadata| {
        metadata.clear();
        let k_weight = tensors.get_mut("k_weight").unwrap();
        k_weight.1[0] = 100;
        k_weight.2.truncate(100 * 8 * 4);
    });
    folder.assert_input_refused("k_weight: 100 rows are not a multiple of head_dim = 64");

    let folder = Folder::cross(&cross_example());
    folder.change(|_, metadata| drop(metadata.insert("num_kv_heads".into(), "3".into())));
    folder.assert_input_refused("num_kv_heads = 3 is not supported: a divisor of num_heads = 4");
    let end = "k_weight: expected shape [256, 8], found [128, 8]";
    Folder::cross(&cross_example()).assert_refused(&["--num-kv-heads", "4"], "", end);
}

#[test]
fn files_that_are_not_whole_tensor_files_are_named() {
    let folder = Folder::cross(&cross_example());
    let whole = fs::read(folder.input()).unwrap();
    let (found, expected) = (whole.len() - 10, whole.len());
    fs::write(folder.input(), &whole[..found]).unwrap();
    folder.assert_input_refused(&format!("truncated: expected {expected} bytes by its header, found {found}"));
    fs::write(folder.input(), [&whole[..], &[0]].concat()).unwrap();
    folder.assert_input_refused(&format!("too long: expected {expected} bytes by its header, found {}", expected + 1));
    fs::write(folder.input(), b"abc").unwrap();
    folder.assert_input_refused("not a safetensors file: expected at least 8 bytes, found 3");
    fs::write(folder.input(), [&4u64.to_le_bytes()[..], b"oops"].concat()).unwrap();
    folder.assert_refused(
        &[],
        &format!("{}: not a safetensors file: expected a valid header", folder.input().display()),
        "",
    );
    fs::remove_file(folder.input()).unwrap();
    let message = format!("{}: cannot open: No such file or directory (os error 2)", folder.input().display());
    folder.command(&[]).assert().code(1).stderr(format!("error: {message}\n"));
    assert_eq!(fs::read(folder.output()).unwrap(), OLD);
}

#[test]
fn an_output_that_cannot_be_written_is_named_and_nothing_is_left_behind() {
    let folder = Folder::audio(&audio_example());
    fs::remove_file(folder.output()).unwrap();
    fs::create_dir(folder.output()).unwrap();
    let start =
        format!("error: {}: expected a regular file or a new name, found a directory\n", folder.output().display());
    folder.command(&[]).assert().code(1).stdout(is_empty()).stderr(starts_with(start));
    assert!(folder.output().is_dir());
    folder.assert_holds_no_other_file();

    let nowhere = folder.folder.path().join("missing").join("gradients.safetensors");
    let mut command = program();
    command.args(["audio", "--device", "cpu", "--input"]).arg(folder.input()).arg("--output").arg(&nowhere);
    let start = format!("error: {}: cannot create a file in this folder: ", nowhere.parent().unwrap().display());
    command.assert().code(1).stderr(starts_with(start));
    folder.assert_holds_no_other_file();
}

#[test]
fn bad_usage_has_exit_code_2_and_help_has_0() {
    let usages: [&[&str]; 7] = [
        &[],
        &["audio"],
        &["audio", "--input", "a"],
        &["cross", "--input", "a", "--output", "b", "--precision", "best"],
        &["audio", "--input", "a", "--output", "b", "--device", "gpu"],
        &["check", "--suite", "everything"],
        &["measure"],
    ];
    for usage in usages {
        program().args(usage).assert().code(2).stdout(is_empty()).stderr(is_empty().not());
    }
    for command in ["audio", "cross", "check", "bench", "plan", "doctor"] {
        program()
            .args([command, "--help"])
            .assert()
            .success()
            .stdout(contains("Usage: attn-backward"))
            .stderr(is_empty());
    }
    program().arg("--version").assert().success().stdout(starts_with("attn-backward "));
}

#[test]
fn check_compares_the_chosen_cases_with_the_reference() {
    let small = ["check", "--device", "cpu", "--seed", "3", "--random", "1"];
    program()
        .args(small)
        .args(["--suite", "audio", "--cases", "13"])
        .assert()
        .success()
        .stdout(contains("T=128 chunks=1").and(contains("random 0: ")).and(contains("2 passed, 0 failed")));
    program()
        .args(small)
        .args(["--suite", "cross", "--cases", "3"])
        .assert()
        .success()
        .stdout(contains("B=2 S_dec=128 S_enc=128").and(contains("2 passed, 0 failed")));
    program()
        .args(small)
        .args(["--cases", "16"])
        .assert()
        .code(1)
        .stdout(is_empty())
        .stderr("error: cases = 16 is not supported: positions below 16\n");
}

#[test]
fn check_and_bench_refuse_what_they_cannot_run_on() {
    program().args(["check", "--device", "cuda:0"]).assert().code(1).stdout(is_empty()).stderr(starts_with("error: "));
    program().args(["bench", "--device", "cpu"]).assert().code(1).stdout(is_empty()).stderr(
        "error: device = cpu is not supported: times are those of a GPU; `check --device cpu` runs the CPU implementation\n",
    );
    // Before anything is timed, and before a device is looked for.
    program()
        .args(["bench", "--json", "/dev/null"])
        .assert()
        .code(1)
        .stdout(is_empty())
        .stderr("error: /dev/null: expected a regular file or a new name, found a character device\n");
}

#[test]
fn plan_prints_what_chunks_of_any_length_within_bounds_take() {
    program()
        .args(["plan", "audio"])
        .assert()
        .success()
        .stdout(contains("1280 rows in at most 20 chunks of at most 64").and(contains("attention_long").not()));
    program()
        .args(["plan", "audio", "--max-chunk-len", "1000"])
        .assert()
        .success()
        .stdout(contains("1280 rows in at most 20 chunks of at most 1280").and(contains("attention_long")));
}

#[test]
fn doctor_says_what_there_is() {
    program().arg("doctor").assert().success().stdout(
        contains("cpu").and(contains("portable module")).and(contains("hopper module")).and(contains("driver")),
    );
}
