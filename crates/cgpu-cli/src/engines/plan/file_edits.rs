//! The change that adds our runtime to one file or template, or removes it.

use std::path::{Path, PathBuf};

use super::PlanError;
use super::parsed_files::ParsedFile;
use crate::engines::config_file::{self, Original};
use crate::engines::config_text::{self, ChangeRequest, Format, HEADER};
use crate::engines::distributions::template;
use crate::engines::file_change::{Backup, Change, read_backup};
use crate::engines::host_tree::Tree;

/// The change that adds our runtime to a file.
pub(super) fn into_file(
    tree: &Tree,
    path: PathBuf,
    format: Format,
    file: Option<ParsedFile>,
    requested: ChangeRequest<'_>,
) -> Result<Option<Change>, PlanError> {
    let start = match (&file, format) {
        (Some(file), _) => file.original.text.clone(),
        (None, Format::Docker) => String::new(),
        (None, Format::Containerd { version, .. }) => format!("{HEADER}version = {version}\n"),
        (None, _) => HEADER.to_owned(),
    };
    let after = config_text::edit(format, &start, requested)
        .map_err(|source| PlanError::Edit { path: path.clone(), source })?;
    if file.as_ref().is_some_and(|file| file.original.text == after) {
        return Ok(None);
    }
    let at = tree.at(&path);
    let backup = match &file {
        Some(file) if is_backed_up(file, &at) => Backup::Keep,
        _ => Backup::Make,
    };
    let before = file.map(|file| file.original);
    writable(&at, &path, before.as_ref())?;
    Ok(Some(Change { at, path, before, after: Some(after), backup }))
}

/// The change that adds our runtime to a template.
pub(super) fn into_template(
    tree: &Tree,
    path: PathBuf,
    format: Format,
    requested: ChangeRequest<'_>,
) -> Result<Option<Change>, PlanError> {
    let edit_error = |source| PlanError::Edit { path: path.clone(), source };
    let at = tree.at(&path);
    let before = config_file::read(&at, &path)?;
    let block = config_text::edit(format, "", requested).map_err(edit_error)?;
    let text = before.as_ref().map(|before| before.text.as_str());
    let after = template::add(text, &block).map_err(edit_error)?;
    if text == Some(after.as_str()) {
        return Ok(None);
    }
    let backup = match text.is_some_and(template::is_in) {
        true => Backup::Keep,
        false => Backup::Make,
    };
    writable(&at, &path, before.as_ref())?;
    Ok(Some(Change { at, path, before, after: Some(after), backup }))
}

/// The change that removes our runtime from a file.
pub(super) fn out_of_file(tree: &Tree, file: ParsedFile) -> Result<Option<Change>, PlanError> {
    let at = tree.at(&file.path);
    let edit_error = |source| PlanError::Edit { path: file.path.clone(), source };
    let former = read_backup(&at);
    let requested = ChangeRequest::Remove { former: former.as_deref() };
    let text = &file.original.text;
    let after = config_text::edit(file.format, text, requested).map_err(edit_error)?;
    if after == *text {
        return Ok(None);
    }
    // A file that setup made is removed: nothing is in it, and nothing was.
    let is_remark = |line: &str| line.starts_with('#') && line != HEADER.trim_end();
    let remarks = text.lines().map(str::trim).any(is_remark);
    let bare = config_text::is_bare(file.format, &after) && !remarks;
    let made = bare
        && former.as_ref().is_none_or(|former| {
            let emptied =
                config_text::edit(file.format, former, ChangeRequest::Remove { former: None });
            let ours = config_text::read(file.format, former).is_ok_and(|config| config.runtime);
            ours && emptied.is_ok_and(|emptied| config_text::is_bare(file.format, &emptied))
        });
    let backup = match &former {
        Some(former) if *former == after => Backup::Drop,
        Some(_) => Backup::Keep,
        None => Backup::Make,
    };
    writable(&at, &file.path, Some(&file.original))?;
    Ok(Some(Change {
        at,
        path: file.path,
        before: Some(file.original),
        after: (!made).then_some(after),
        backup: if made { Backup::Drop } else { backup },
    }))
}

/// The change that removes our runtime from a template.
pub(super) fn out_of_template(tree: &Tree, path: PathBuf) -> Result<Option<Change>, PlanError> {
    let at = tree.at(&path);
    let Some(before) = config_file::read(&at, &path)? else { return Ok(None) };
    if !template::is_in(&before.text) {
        return Ok(None);
    }
    let after = template::remove(&before.text);
    let former = read_backup(&at);
    let backup = match (&former, &after) {
        (_, None) => Backup::Drop,
        (Some(former), Some(after)) if former == after => Backup::Drop,
        (Some(_), _) => Backup::Keep,
        (None, _) => Backup::Make,
    };
    writable(&at, &path, Some(&before))?;
    Ok(Some(Change { at, path, before: Some(before), after, backup }))
}

/// Whether a file's backup is its text before setup first edited it.
fn is_backed_up(file: &ParsedFile, at: &Path) -> bool {
    let Some(former) = read_backup(at) else { return false };
    let Ok(former) = config_text::read(file.format, &former) else { return false };
    // The backup of a file without our runtime is older. If another default runtime was
    // named since, that is what --remove has to restore.
    file.config.runtime && (file.config.is_default() || file.config.default == former.default)
}

fn writable(at: &Path, path: &Path, before: Option<&Original>) -> Result<(), PlanError> {
    Ok(config_file::check(at, path, before)?)
}
