//! The file by which an engine describes a process that it starts in a running container
//! (`exec --process`): the `process` of a bundle, by itself.
//!
//! Read, looked into and replaced as a bundle is.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{Bundle, BundleError, edit};

/// A process to start.
#[derive(Debug, Clone)]
pub struct ProcessFile(Bundle);

impl ProcessFile {
    /// Reads the file at `path`.
    ///
    /// # Errors
    ///
    /// Where there is none, it is a link, or it is no JSON object.
    pub fn load(path: &Path) -> Result<Self, BundleError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        // `/dev/stdin`, say: what would be replaced is the link.
        if !fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file()) {
            let dir = path.parent().unwrap_or(&path).to_owned();
            return Err(BundleError::NoFile { dir, file: path });
        }
        let name = path.file_name().unwrap_or_default();
        Bundle::load(path.parent().unwrap_or(&path), Path::new(name)).map(ProcessFile)
    }

    /// Its variables; those that are no strings are the runtime's to refuse.
    #[must_use]
    pub fn env(&self) -> Vec<&str> {
        let items = self.0.value.get("env").and_then(Value::as_array);
        items.into_iter().flatten().filter_map(Value::as_str).collect()
    }

    /// Sets variables, and replaces the file.
    ///
    /// # Errors
    ///
    /// Where its variables are no list, or it can't be written.
    pub fn set_env(mut self, variables: &[(String, String)]) -> Result<(), BundleError> {
        if variables.is_empty() {
            return Ok(());
        }
        self.0.before = Some(self.0.value.clone());
        edit::set_env(&mut self.0.value, &["env"], variables)
            .map_err(|(field, expected)| self.0.misshapen(field, expected))?;
        self.0.save()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_variables_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("runc-process1");
        let text = "{\"args\":[\"\\u003c\"],\n \"env\": [\"A=b\"], \"x\": 1.50}";
        fs::write(&path, text).unwrap();
        let file = ProcessFile::load(&path).unwrap();
        assert_eq!(file.env(), ["A=b"]);
        file.clone().set_env(&[]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        file.set_env(&[("B".into(), "c".into())]).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            text.replace("[\"A=b\"]", "[\"A=b\",\"B=c\"]")
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(ProcessFile::load(&dir.path().join("none")).is_err());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(ProcessFile::load(&link).is_err(), "a link would be replaced by a file");
    }
}
