//! Tensor files: what is written is read back, and everything wrong with a file is one line that says what and where.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use attn_backward::cross::Precision;
use attn_backward::file::{
    AudioOptions, CrossOptions, NonFinite, Provenance, check_writable, non_finite_audio, non_finite_cross, read_audio,
    read_cross, write_audio_gradients, write_audio_inputs, write_cross_gradients, write_cross_inputs, write_text,
};
use attn_backward::suite::{audio_inputs, cross_inputs};
use attn_backward::{CuSeqlens, audio, cross};
use half::bf16;
use proptest::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::{TempDir, tempdir};

fn audio_example() -> audio::Inputs {
    let cu_seqlens = CuSeqlens::new(&[0, 2, 2, 5], 6).unwrap();
    audio_inputs(1, audio::Shape { total_seq_len: 6, num_heads: 2, scale: 0.2 }, cu_seqlens)
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

/// A tensor of a file that a test changes.
#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A file's tensors and metadata, to be changed and written again by the safetensors crate itself.
struct Parts {
    tensors: HashMap<String, Tensor>,
    metadata: HashMap<String, String>,
}

impl Parts {
    fn read(path: &Path) -> Parts {
        let bytes = fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = tensors.iter().map(|(name, view)| {
            let tensor = Tensor { dtype: view.dtype(), shape: view.shape().into(), bytes: view.data().into() };
            (name.to_string(), tensor)
        });
        Parts { tensors: tensors.collect(), metadata: header.metadata().clone().unwrap_or_default() }
    }

    fn write(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, tensor)| {
            (name.clone(), TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
        });
        safetensors::serialize_to_file(views, Some(self.metadata.clone()), path).unwrap();
    }

    fn rename(&mut self, from: &str, to: &str) {
        let tensor = self.tensors.remove(from).unwrap();
        self.tensors.insert(to.into(), tensor);
    }
}

/// Writes the example of operation A, changed, and returns what reading it says, without the folder.
fn audio_error(change: impl FnOnce(&mut Parts)) -> String {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    write_audio_inputs(&path, &audio_example()).unwrap();
    let mut parts = Parts::read(&path);
    change(&mut parts);
    parts.write(&path);
    without_folder(&folder, read_audio(&path, &AudioOptions::default()).unwrap_err().to_string())
}

/// The same for operation B.
fn cross_error(change: impl FnOnce(&mut Parts)) -> String {
    let folder = tempdir().unwrap();
    let path = folder.path().join("b.safetensors");
    write_cross_inputs(&path, &cross_example()).unwrap();
    let mut parts = Parts::read(&path);
    change(&mut parts);
    parts.write(&path);
    without_folder(&folder, read_cross(&path, &CrossOptions::default()).unwrap_err().to_string())
}

fn without_folder(folder: &TempDir, message: String) -> String {
    assert!(!message.contains('\n'), "more than one line: {message}");
    message.replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn audio_inputs_are_read_back_bit_by_bit() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("inputs.safetensors");
    let inputs = audio_example();
    write_audio_inputs(&path, &inputs).unwrap();
    let read = read_audio(&path, &AudioOptions::default()).unwrap();
    assert_eq!((read.scale, &read.cu_seqlens), (0.2, &inputs.cu_seqlens));
    assert_eq!((&read.grad_output, &read.hidden_states), (&inputs.grad_output, &inputs.hidden_states));
    assert_eq!((&read.query_states, &read.key_states), (&inputs.query_states, &inputs.key_states));
    assert_eq!((&read.value_states, &read.q_weight), (&inputs.value_states, &inputs.q_weight));
    assert_eq!((&read.k_weight, &read.v_weight), (&inputs.k_weight, &inputs.v_weight));
    assert_eq!(read.out_weight, inputs.out_weight);
}

#[test]
fn cross_inputs_are_read_back_bit_by_bit() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("inputs.safetensors");
    let inputs = cross_example();
    write_cross_inputs(&path, &inputs).unwrap();
    let read = read_cross(&path, &CrossOptions::default()).unwrap();
    assert_eq!(read.num_kv_heads, 2);
    assert_eq!((&read.grad_query_states, &read.grad_key_states), (&inputs.grad_query_states, &inputs.grad_key_states));
    assert_eq!(read.grad_value_states, inputs.grad_value_states);
    assert_eq!(read.decoder_hidden_states, inputs.decoder_hidden_states);
    assert_eq!(read.encoder_hidden_states, inputs.encoder_hidden_states);
    assert_eq!(
        (&read.q_weight, &read.k_weight, &read.v_weight),
        (&inputs.q_weight, &inputs.k_weight, &inputs.v_weight)
    );
}

#[test]
fn gradients_are_written_under_their_names_with_how_they_were_computed() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("grads.safetensors");
    let grads = audio::cpu::backward(&audio_example()).unwrap();
    write_audio_gradients(&path, &grads, &Provenance { device: "cpu".into(), precision: None }).unwrap();
    let parts = Parts::read(&path);
    assert_eq!(parts.tensors.len(), 9);
    for (name, tensor) in grads.tensors() {
        let stored = &parts.tensors[name];
        assert_eq!((stored.dtype, stored.shape.as_slice()), (Dtype::BF16, tensor.shape()));
        let values: Vec<bf16> = stored.bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
        assert!(values.iter().eq(tensor.iter()), "{name}");
    }
    assert_eq!((parts.metadata["operation"].as_str(), parts.metadata["device"].as_str()), ("audio", "cpu"));
    assert!(!parts.metadata.contains_key("precision"));

    let grads = cross::cpu::backward(&cross_example()).unwrap();
    let how = Provenance { device: "cuda:0".into(), precision: Some(Precision::High) };
    write_cross_gradients(&path, &grads, &how).unwrap();
    let parts = Parts::read(&path);
    for (name, tensor) in grads.tensors() {
        let stored = &parts.tensors[name];
        assert_eq!((stored.dtype, stored.shape.as_slice()), (Dtype::F32, tensor.shape()));
        let values: Vec<f32> =
            stored.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(values.iter().eq(tensor.iter()), "{name}");
    }
    assert_eq!((parts.metadata["operation"].as_str(), parts.metadata["precision"].as_str()), ("cross", "high"));
}

#[test]
fn scalars_come_from_options_then_metadata_then_shapes() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("inputs.safetensors");
    write_audio_inputs(&path, &audio_example()).unwrap();
    assert_eq!(read_audio(&path, &AudioOptions { scale: Some(0.5) }).unwrap().scale, 0.5);
    let mut parts = Parts::read(&path);
    parts.metadata.clear();
    parts.write(&path);
    assert_eq!(read_audio(&path, &AudioOptions::default()).unwrap().scale, 0.125);

    write_cross_inputs(&path, &cross_example()).unwrap();
    let refused = read_cross(&path, &CrossOptions { num_kv_heads: Some(4) }).unwrap_err().to_string();
    assert!(refused.ends_with("k_weight: expected shape [256, 8], found [128, 8]"), "{refused}");
    let mut parts = Parts::read(&path);
    parts.metadata.clear();
    parts.write(&path);
    assert_eq!(read_cross(&path, &CrossOptions::default()).unwrap().num_kv_heads, 2);
    parts.metadata.insert("num_key_value_heads".into(), "2".into());
    parts.write(&path);
    assert_eq!(read_cross(&path, &CrossOptions::default()).unwrap().num_kv_heads, 2);
}

#[test]
fn other_tensors_are_ignored() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("inputs.safetensors");
    write_audio_inputs(&path, &audio_example()).unwrap();
    let mut parts = Parts::read(&path);
    let extra = Tensor { dtype: Dtype::F64, shape: vec![1], bytes: vec![0; 8] };
    parts.tensors.insert("attention_mask".into(), extra);
    parts.write(&path);
    assert!(read_audio(&path, &AudioOptions::default()).is_ok());
}

#[test]
fn missing_and_misnamed_tensors_are_named_with_the_nearest_name() {
    assert_eq!(
        audio_error(|parts| parts.rename("k_weight", "k_proj_weight")),
        "a.safetensors: tensor k_weight is missing; did you mean to rename k_proj_weight?"
    );
    assert_eq!(
        cross_error(|parts| parts.rename("grad_key_states", "grad_keys_states")),
        "b.safetensors: tensor grad_key_states is missing; did you mean to rename grad_keys_states?"
    );
    assert_eq!(
        cross_error(|parts| drop(parts.tensors.remove("v_weight"))),
        "b.safetensors: tensor v_weight is missing; found decoder_hidden_states, encoder_hidden_states, grad_key_states, \
         grad_query_states, grad_value_states, k_weight, q_weight"
    );
    assert_eq!(audio_error(|parts| parts.tensors.clear()), "a.safetensors: tensor grad_output is missing; found none");
}

#[test]
fn wrong_dtypes_are_named_with_expected_and_found() {
    let widen = |parts: &mut Parts| {
        let cu_seqlens = parts.tensors.get_mut("cu_seqlens").unwrap();
        cu_seqlens.dtype = Dtype::I64;
        cu_seqlens.bytes = [0i64, 2, 2, 5].iter().flat_map(|x| x.to_le_bytes()).collect();
    };
    assert_eq!(
        audio_error(widen),
        "a.safetensors: tensor cu_seqlens: expected dtype I32, found I64; convert it before saving"
    );
    assert_eq!(
        audio_error(|parts| parts.tensors.get_mut("v_weight").unwrap().dtype = Dtype::F16),
        "a.safetensors: tensor v_weight: expected dtype BF16, found F16; convert it before saving"
    );
    assert_eq!(
        cross_error(|parts| parts.tensors.get_mut("q_weight").unwrap().dtype = Dtype::I32),
        "b.safetensors: tensor q_weight: expected dtype F32, found I32; convert it before saving"
    );
}

#[test]
fn wrong_shapes_are_named_with_expected_and_found() {
    assert_eq!(
        audio_error(|parts| parts.tensors.get_mut("query_states").unwrap().shape = vec![2, 6, 64]),
        "a.safetensors: tensor query_states: expected shape [1, num_heads, total_seq_len, 64], found [2, 6, 64]"
    );
    assert_eq!(
        audio_error(|parts| parts.tensors.get_mut("hidden_states").unwrap().shape = vec![12, 64]),
        "a.safetensors: hidden_states: expected shape [6, 128], found [12, 64]"
    );
    assert_eq!(
        cross_error(|parts| parts.tensors.get_mut("decoder_hidden_states").unwrap().shape = vec![1, 6, 16]),
        "b.safetensors: decoder_hidden_states: expected shape [2, 3, 16], found [1, 6, 16]"
    );
    let huge = |parts: &mut Parts| {
        let tensor = parts.tensors.get_mut("grad_output").unwrap();
        tensor.shape = vec![0, usize::MAX];
        tensor.bytes.clear();
    };
    assert_eq!(
        audio_error(huge),
        format!(
            "a.safetensors: tensor grad_output: expected shape [total_seq_len, d_model], found [0, {}]",
            usize::MAX
        )
    );
}

#[test]
fn bad_values_are_named() {
    let set_offsets = |offsets: [i32; 4]| {
        move |parts: &mut Parts| {
            parts.tensors.get_mut("cu_seqlens").unwrap().bytes = offsets.iter().flat_map(|x| x.to_le_bytes()).collect();
        }
    };
    assert_eq!(
        audio_error(set_offsets([0, 2, 1, 5])),
        "a.safetensors: cu_seqlens[2] = 1: offsets do not decrease, and the one before is 2"
    );
    assert_eq!(
        audio_error(set_offsets([0, 2, 4, 7])),
        "a.safetensors: cu_seqlens[3] = 7: offsets do not exceed total_seq_len = 6"
    );
    assert_eq!(
        audio_error(|parts| drop(parts.metadata.insert("scale".into(), "one".into()))),
        "a.safetensors: metadata scale: expected a number, found \"one\""
    );
    assert_eq!(
        cross_error(|parts| drop(parts.metadata.insert("num_kv_heads".into(), "3".into()))),
        "b.safetensors: num_kv_heads = 3 is not supported: a divisor of num_heads = 4"
    );
}

#[test]
fn files_that_are_no_tensor_files_are_named() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let refused = || without_folder(&folder, read_audio(&path, &AudioOptions::default()).unwrap_err().to_string());
    assert_eq!(refused(), "x.safetensors: cannot open: No such file or directory (os error 2)");
    fs::write(&path, b"abc").unwrap();
    assert_eq!(refused(), "x.safetensors: not a safetensors file: expected at least 8 bytes, found 3");
    fs::write(&path, b"PK\x03\x04 some other archive").unwrap();
    assert!(refused().starts_with("x.safetensors: not a safetensors file: expected a header of at most"));
    fs::write(&path, [&4u64.to_le_bytes()[..], b"oops"].concat()).unwrap();
    assert!(refused().starts_with("x.safetensors: not a safetensors file: expected a valid header, found: "));
    write_audio_inputs(&path, &audio_example()).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let len = bytes.len();
    bytes.push(0);
    fs::write(&path, &bytes).unwrap();
    assert_eq!(refused(), format!("x.safetensors: too long: expected {len} bytes by its header, found {}", len + 1));
    bytes.truncate(len - 10);
    fs::write(&path, &bytes).unwrap();
    assert_eq!(refused(), format!("x.safetensors: truncated: expected {len} bytes by its header, found {}", len - 10));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn truncated_or_damaged_files_never_panic(cut in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let folder = tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        write_cross_inputs(&path, &cross_example()).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let cut = cut.index(bytes.len());
        fs::write(&path, &bytes[..cut]).unwrap();
        let message = without_folder(&folder, read_cross(&path, &CrossOptions::default()).unwrap_err().to_string());
        prop_assert!(message.starts_with("x.safetensors: "));
        // The header is where a byte can do harm.
        let at = at.index(900);
        bytes[at] = byte;
        fs::write(&path, &bytes).unwrap();
        if let Err(error) = read_cross(&path, &CrossOptions::default()) {
            let message = without_folder(&folder, error.to_string());
            prop_assert!(message.starts_with("x.safetensors: "));
        }
    }
}

#[test]
fn failed_write_leaves_the_folder_as_it_was() {
    let folder = tempdir().unwrap();
    let target = folder.path().join("grads.safetensors");
    fs::create_dir(&target).unwrap();
    let grads = audio::cpu::backward(&audio_example()).unwrap();
    let how = Provenance { device: "cpu".into(), precision: None };
    let error = write_audio_gradients(&target, &grads, &how).unwrap_err().to_string();
    assert_eq!(
        without_folder(&folder, error),
        "grads.safetensors: expected a regular file or a new name, found a directory"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let nowhere = folder.path().join("missing/grads.safetensors");
    let error = write_audio_gradients(&nowhere, &grads, &how).unwrap_err().to_string();
    assert_eq!(
        without_folder(&folder, error),
        "missing: cannot create a file in this folder: No such file or directory (os error 2)"
    );
}

#[test]
fn devices_and_sockets_are_never_replaced() {
    let refused = |path: &Path| write_text(path, "{}").unwrap_err().to_string();
    let expected = "/dev/null: expected a regular file or a new name, found a character device";
    assert_eq!(refused(Path::new("/dev/null")), expected);
    assert_eq!(check_writable(Path::new("/dev/null")).unwrap_err().to_string(), expected);
    let folder = tempdir().unwrap();
    let socket = folder.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let link = folder.path().join("link");
    symlink(&socket, &link).unwrap();
    assert_eq!(without_folder(&folder, refused(&link)), "link: expected a regular file or a new name, found a socket");
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn links_stay_and_what_they_point_to_is_replaced_beside_itself() {
    let folder = tempdir().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let link = folder.path().join("link.json");
    symlink("inner/real.json", &link).unwrap();
    // First the link leads nowhere, then to a file.
    for text in ["first", "second"] {
        write_text(&link, text).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(inner.join("real.json")).unwrap(), text);
    }
    assert_eq!((fs::read_dir(folder.path()).unwrap().count(), fs::read_dir(&inner).unwrap().count()), (2, 1));
    let cycle = folder.path().join("cycle");
    symlink("cycle", &cycle).unwrap();
    let error = write_text(&cycle, "").unwrap_err().to_string();
    assert!(without_folder(&folder, error).starts_with("cycle: cannot open: "));
}

#[test]
fn permissions_of_a_replaced_file_are_kept() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("inputs.safetensors");
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    write_cross_inputs(&path, &cross_example()).unwrap();
    for kept in [0o600, 0o664, 0o440] {
        fs::set_permissions(&path, fs::Permissions::from_mode(kept)).unwrap();
        write_cross_inputs(&path, &cross_example()).unwrap();
        assert_eq!(mode(), kept);
    }
}

#[test]
fn checking_leaves_nothing_behind() {
    let folder = tempdir().unwrap();
    check_writable(&folder.path().join("rows.json")).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn names_and_lists_from_files_are_escaped_and_cut() {
    let hostile = format!("k_weigh\n\u{1b}[2J{}", "x".repeat(200));
    let only = |name: &str| {
        let name = name.to_string();
        move |parts: &mut Parts| {
            parts.tensors.retain(|found, _| found == "k_weight");
            parts.rename("k_weight", &name);
        }
    };
    let cut = format!("k_weigh\\n\\u{{1b}}[2J{}...", "x".repeat(68));
    assert_eq!(audio_error(only(&hostile)), format!("a.safetensors: tensor grad_output is missing; found {cut}"));
    assert_eq!(
        audio_error(|parts| parts.rename("k_weight", "k_weigh\n")),
        "a.safetensors: tensor k_weight is missing; did you mean to rename k_weigh\\n?"
    );
    let many = |parts: &mut Parts| {
        let tensor = parts.tensors["k_weight"].clone();
        parts.tensors = (0..25).map(|i| (format!("{i:02}"), tensor.clone())).collect();
    };
    assert!(
        audio_error(many).ends_with(
            "found 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 5 more"
        )
    );
    let deep =
        |parts: &mut Parts| parts.tensors.get_mut("k_weight").unwrap().shape = [vec![1; 28], vec![128, 128]].concat();
    assert!(audio_error(deep).ends_with(&format!("found [{} and 10 more]", ["1"; 20].join(", "))));
    let scalar = |parts: &mut Parts| drop(parts.metadata.insert("scale".into(), "\n".repeat(100)));
    assert!(audio_error(scalar).ends_with(&format!("expected a number, found \"{}...\"", "\\n".repeat(80))));
}

#[test]
fn tensors_of_the_other_operation_are_not_proposed() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write_cross_inputs(&path, &cross_example()).unwrap();
    let error = read_audio(&path, &AudioOptions::default()).unwrap_err().to_string();
    assert!(error.contains("tensor grad_output is missing; found "), "{error}");
    let error = audio_error(|parts| parts.rename("query_states", "grad_query_states"));
    assert!(error.contains("tensor query_states is missing; found "), "{error}");
}

#[test]
fn key_value_heads_that_do_not_follow_from_the_weight_are_named() {
    let cut = |parts: &mut Parts| {
        parts.metadata.clear();
        let weight = parts.tensors.get_mut("k_weight").unwrap();
        weight.shape = vec![100, 8];
        weight.bytes.truncate(100 * 8 * 4);
    };
    assert_eq!(cross_error(cut), "b.safetensors: k_weight: 100 rows are not a multiple of head_dim = 64");
}

#[test]
fn overlapping_tensors_are_no_valid_header() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat()).unwrap();
    let error = read_audio(&path, &AudioOptions::default()).unwrap_err().to_string();
    assert!(
        without_folder(&folder, error)
            .starts_with("x.safetensors: not a safetensors file: expected a valid header, found: ")
    );
}

#[test]
fn successful_write_replaces_and_leaves_nothing_else() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("grads.safetensors");
    fs::write(&path, b"old").unwrap();
    let grads = cross::cpu::backward(&cross_example()).unwrap();
    write_cross_gradients(&path, &grads, &Provenance { device: "cpu".into(), precision: None }).unwrap();
    assert_eq!(Parts::read(&path).tensors.len(), 5);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn non_finite_values_are_reported_by_tensor_and_first_row_and_read_all_the_same() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("inputs.safetensors");
    let mut inputs = audio_example();
    assert!(non_finite_audio(&inputs).is_empty());
    inputs.key_states[[0, 1, 3, 7]] = bf16::NAN;
    inputs.key_states[[0, 1, 4, 0]] = bf16::INFINITY;
    inputs.grad_output[[5, 127]] = bf16::NEG_INFINITY;
    write_audio_inputs(&path, &inputs).unwrap();
    let read = read_audio(&path, &AudioOptions::default()).unwrap();
    let report = non_finite_audio(&read);
    let expected = [
        ("grad_output", NonFinite { count: 1, first_row: vec![5] }),
        ("key_states", NonFinite { count: 2, first_row: vec![0, 1, 3] }),
    ];
    assert_eq!(report, expected);
    assert_eq!(report[1].1.to_string(), "2 non-finite values, the first in row [0, 1, 3]");

    let mut inputs = cross_example();
    inputs.encoder_hidden_states[[1, 2, 0]] = f32::NAN;
    assert_eq!(non_finite_cross(&inputs), [("encoder_hidden_states", NonFinite { count: 1, first_row: vec![1, 2] })]);
}
