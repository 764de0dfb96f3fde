-- Scanner calls that take many executions at once.

-- One answer per id from `first` on. A record that cannot be handled answers
-- `error:<why>`: it must not undo or hide what the call does for the others.
function batch.each(ids, first, handle)
  local answers = {}
  for i = first, #ids do
    local ok, answer = try(handle, ids[i])
    if not ok then answer = 'error:' .. answer end
    answers[#answers + 1] = answer
  end
  return answers
end
